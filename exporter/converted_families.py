"""The published families that transformers does not ship, each as data: its fields and tensors in one that it ships."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from transformers import GlmForCausalLM, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen2ForCausalLM

from spaceport.exporter.checkpoint_files import CONVERTED_TYPES
from spaceport.graphs.contract.faults import CheckpointError
from spaceport.graphs.contract.json_fields import is_whole, short

# Fields of every configuration that say nothing about the architecture.
_GENERAL = frozenset((*PreTrainedConfig().to_dict(), "_name_or_path", "auto_map", "torch_dtype", "tokenizer_class"))
_DTYPES = ("float32", "float16", "bfloat16")


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


# Whether a value is one of the kind, and what is expected.
_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "size": (lambda value: is_whole(value, 1), "a whole number of at least 1"),
    "number": (_is_positive, "a number above 0"),
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "token ids": (lambda value: True, "ids of tokens"),
}


@dataclass(frozen=True)
class Field:
    """A published field."""

    name: str
    kind: Literal["size", "number", "flag", "token ids"] = "size"
    default: Any = None  # value of the original code where the field is missing


@dataclass(frozen=True)
class Fixed:
    """A published field that converts exactly with one value only."""

    value: object
    default: object  # value of the original code where the field is missing
    otherwise: str  # what the model has with any other value


@dataclass(frozen=True)
class Fields:
    """The fields of a published config.json."""

    file: Path
    content: Mapping[str, Any]
    title: str  # of the family, in messages

    def refuse(self, problem: str, expected: str, advice: str = "copy or download it again") -> NoReturn:
        raise CheckpointError(f"{self.file}: {problem}: expected {expected}; {advice}")

    def read(self, field: Field) -> Any:
        """The value of a field; raise if it is none of its kind."""
        value = self.content.get(field.name, field.default)
        is_valid, expected = _KINDS[field.kind]
        if not is_valid(value):
            problem = "is missing" if value is None else f"is {short(value)}"
            self.refuse(f"{field.name} {problem}", f"{expected} in a {self.title} configuration")
        return float(value) if field.kind == "number" else value

    def dtype(self) -> str | None:
        """The type of the published weights, if the configuration says it."""
        named = str(self.content.get("torch_dtype") or self.content.get("dtype") or self.content.get("params_dtype"))
        flags = {"bfloat16": self.content.get("bf16"), "float16": self.content.get("fp16")}
        stated = [named.removeprefix("torch."), *(dtype for dtype, flag in flags.items() if flag is True)]
        return next((dtype for dtype in stated if dtype in _DTYPES), None)

    def check(self, fixed: Mapping[str, Fixed], known: Collection[str]) -> None:
        """Raise for values that cannot be converted exactly, and for fields that are not known."""
        for name in ("quantization_config", "quantization_bit"):
            if self.content.get(name):
                self.refuse(
                    f"{name} is {short(self.content[name])}, so its weights are quantized",
                    "the published weights in float16 or bfloat16",
                    "download these, and quantize them with --format",
                )
        for name, rule in fixed.items():
            value = self.content.get(name, rule.default)
            if value != rule.value or isinstance(value, bool) != isinstance(rule.value, bool):
                self.refuse(
                    f"{name} is {short(value)}, so the model has {rule.otherwise}",
                    f"{rule.value!r} in a {self.title} checkpoint, which alone converts exactly",
                    "use a checkpoint of a family that transformers ships",
                )
        unknown = sorted(set(self.content) - _GENERAL - set(fixed) - set(known))
        if unknown:
            self.refuse(
                f"unknown field {unknown[0]!r} ({short(self.content[unknown[0]])})",
                f"the fields of the published {self.title} configuration",
                "remove the field if it does not change the model",
            )


@dataclass(frozen=True)
class OtherRelease:
    """A release with the same model_type that does not convert, by fields that only it has."""

    fields: tuple[str, ...]
    problem: str
    expected: str
    advice: str


@dataclass(frozen=True)
class Family:
    """A published family: how its configuration and its tensors are converted."""

    title: str
    model: type[PreTrainedModel]  # of the converted checkpoint
    fields: Mapping[str, Field]  # published fields, by name in the converted configuration
    fixed: Mapping[str, Fixed]  # by published name
    # Other published fields: those that `complete` reads, and those without effect on logits.
    known: tuple[str, ...]
    # Checks the published fields against each other; returns the entries of the configuration that are computed.
    complete: Callable[[Fields, Mapping[str, Any]], dict[str, Any]]
    # Published names of modules, by names in the converted model, replaced in this order. Modules of one published
    # name are consecutive rows of its tensors, in the order of the converted model: queries, keys, values.
    names: Mapping[str, str]
    other_release: OtherRelease | None = None

    def config(self, fields: Fields) -> PreTrainedConfig:
        """The configuration of the converted model; raise if it cannot be converted exactly."""
        other = self.other_release
        if other is not None and any(name in fields.content for name in other.fields):
            fields.refuse(other.problem, other.expected, other.advice)
        fields.check(self.fixed, (*(field.name for field in self.fields.values()), *self.known))
        entries = {name: fields.read(field) for name, field in self.fields.items()}
        converted_class: Any = self.model.config_class
        config: PreTrainedConfig = converted_class(**{**entries, **self.complete(fields, entries)})
        return config


# Fields that several families have under the name of the converted configuration
_SIZES = {
    name: Field(name)
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
_QUERIES_KEYS_VALUES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _complete_chatglm(fields: Fields, entries: Mapping[str, Any]) -> dict[str, Any]:
    heads, groups, channels = (entries[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if heads % groups:
        fields.refuse(f"num_attention_heads is {heads}", f"a multiple of multi_query_group_num {groups}")
    if channels % 4:
        fields.refuse(f"kv_channels is {channels}", "a multiple of 4, because half of them rotate in pairs")
    base = 10000.0 * fields.read(Field("rope_ratio", "number", 1))
    return {
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5},
    }


_CHATGLM = Family(
    title="ChatGLM3",
    model=GlmForCausalLM,
    fields={
        "vocab_size": Field("padded_vocab_size"),
        "hidden_size": Field("hidden_size"),
        "intermediate_size": Field("ffn_hidden_size"),
        "num_hidden_layers": Field("num_layers"),
        "num_attention_heads": Field("num_attention_heads"),
        "num_key_value_heads": Field("multi_query_group_num"),
        "head_dim": Field("kv_channels"),
        "rms_norm_eps": Field("layernorm_epsilon", "number"),
        "max_position_embeddings": Field("seq_length"),
        "attention_bias": Field("add_qkv_bias", "flag", False),
        "eos_token_id": Field("eos_token_id", "token ids"),
        "pad_token_id": Field("pad_token_id", "token ids"),
    },
    fixed={
        "multi_query_attention": Fixed(
            True, False, "one key and value head per query head, interleaved with the queries"
        ),
        "rmsnorm": Fixed(True, True, "layer norms with biases"),
        "post_layer_norm": Fixed(True, True, "no norm before its head"),
        "add_bias_linear": Fixed(False, False, "biases in all linear layers"),
        "apply_residual_connection_post_layernorm": Fixed(False, False, "residual connections from behind its norms"),
        "fp32_residual_connection": Fixed(False, False, "residuals of another data type than its weights"),
        "original_rope": Fixed(True, True, "another rotary embedding"),
        "interleaved_qkv": Fixed(False, False, "another order of queries, keys and values"),
        "rotary_percent": Fixed(0.5, 0.5, "another number of rotated dimensions"),
        "pre_seq_len": Fixed(None, None, "a trained prefix (P-tuning)"),
        "prefix_projection": Fixed(False, False, "a trained prefix (P-tuning)"),
        "tie_word_embeddings": Fixed(False, False, "a flag that the original code ignores"),
    },
    known=(
        "rope_ratio",
        # Training, or the order of operations: attention scores are divided by the layer's number and multiplied by it.
        *("attention_dropout", "hidden_dropout", "classifier_dropout", "bias_dropout_fusion", "use_cache"),
        *("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "vocab_size", "quantization_bit"),
    ),
    complete=_complete_chatglm,
    names={
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.layers": "transformer.encoder.layers",
        "model.norm": "transformer.encoder.final_layernorm",
        "lm_head": "transformer.output_layer",
        **dict.fromkeys(_QUERIES_KEYS_VALUES, "self_attention.query_key_value"),
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",  # the gate's rows are the first half in both
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    other_release=OtherRelease(
        fields=("position_encoding_2d", "inner_hidden_size"),
        problem="a configuration of the first ChatGLM-6B (two-dimensional positions)",
        expected="ChatGLM3, such as chatglm3-6b",
        advice="use that",
    ),
)


def _complete_internlm(fields: Fields, entries: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = entries["num_attention_heads"], entries["hidden_size"]
    if fields.read(Field("num_key_value_heads", default=heads)) != heads:
        fields.refuse(
            f"num_key_value_heads is {fields.content['num_key_value_heads']}",
            f"{heads}, the number of query heads, in an InternLM v1 checkpoint",
            "use internlm2 or later with grouped heads",
        )
    if hidden % (2 * heads):
        fields.refuse(f"hidden_size is {hidden}", f"{heads} heads of an even number of dimensions")
    rotary = fields.content.get("rotary")
    if not rotary:  # both types have the same frequencies up to max_position_embeddings
        rotary = {"base": fields.read(Field("rope_theta", "number", 10000.0)), "type": "dynamic"}
    known = isinstance(rotary, dict) and set(rotary) <= {"base", "type", "scaling_factor"}
    if not known or rotary.get("type") not in ("origin", "dynamic"):
        fields.refuse(
            f"rotary is {rotary!r:.80}",
            "an object with base, type (origin or dynamic) and optionally scaling_factor",
            "use an InternLM v1 checkpoint with one of these",
        )
    inside = replace(fields, content={f"rotary.{name}": value for name, value in rotary.items()})
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": inside.read(Field("rotary.base", "number"))}
    if rotary["type"] == "dynamic":
        parameters |= {"rope_type": "dynamic", "factor": inside.read(Field("rotary.scaling_factor", "number", 1.0))}
    return {
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "mlp_bias": False,
        "rope_parameters": parameters,
    }


_INTERNLM = Family(
    title="InternLM v1",
    model=LlamaForCausalLM,
    fields={
        **_SIZES,
        "rms_norm_eps": Field("rms_norm_eps", "number", 1e-6),
        "max_position_embeddings": Field("max_position_embeddings", default=2048),
        "attention_bias": Field("bias", "flag", True),
        "tie_word_embeddings": Field("tie_word_embeddings", "flag", False),
        "bos_token_id": Field("bos_token_id", "token ids", 1),
        "eos_token_id": Field("eos_token_id", "token ids", 2),
        "pad_token_id": Field("pad_token_id", "token ids", 0),
    },
    fixed={
        "hidden_act": Fixed("silu", "silu", "another activation"),
        "rope_scaling": Fixed(None, None, "a rotary scaling that the original code ignores"),
    },
    known=(
        *("num_key_value_heads", "rotary", "rope_theta"),
        *("initializer_range", "use_cache", "pretraining_tp", "attn_implementation"),
    ),
    complete=_complete_internlm,
    names={},  # those of llama
)


def _complete_qwen(fields: Fields, entries: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden, inner = (entries[name] for name in ("num_attention_heads", "hidden_size", "intermediate_size"))
    channels = fields.read(Field("kv_channels", default=128))
    if heads * channels != hidden or channels % 2:
        fields.refuse(
            f"kv_channels is {channels} with {heads} heads",
            f"an even number, and hidden_size {hidden} divided by the heads",
        )
    base = fields.read(Field("rotary_emb_base", "number", 10000))
    if fields.read(Field("rope_theta", "number", base)) != base:
        fields.refuse(
            f"rope_theta is {fields.content['rope_theta']}",
            f"rotary_emb_base, {base:g}",
            "correct the one that is wrong",
        )
    if inner % 2:
        fields.refuse(f"intermediate_size is {inner}", "an even number: the gate and the other half")
    # Longer texts than seq_length change the rotary frequencies (dynamic NTK) and scale the queries (log n).
    positions = entries["max_position_embeddings"]
    if any(fields.read(Field(name, "flag", True)) for name in ("use_dynamic_ntk", "use_logn_attn")):
        positions = min(positions, fields.read(Field("seq_length")))
    return {
        "intermediate_size": inner // 2,  # of the gate, and of the other half
        "num_key_value_heads": heads,
        "max_position_embeddings": positions,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
    }


_QWEN = Family(
    title="Qwen v1",
    model=Qwen2ForCausalLM,
    fields={
        **_SIZES,
        "rms_norm_eps": Field("layer_norm_epsilon", "number", 1e-6),
        "max_position_embeddings": Field("max_position_embeddings", default=8192),
        "tie_word_embeddings": Field("tie_word_embeddings", "flag", False),
    },
    fixed={
        "no_bias": Fixed(True, True, "biases in all linear layers"),
        "rotary_pct": Fixed(1.0, 1.0, "a rotary embedding of a part of each head"),
        "scale_attn_weights": Fixed(True, True, "attention scores that are not scaled"),
        "use_cache_quantization": Fixed(False, False, "a quantized KV cache"),
        "use_cache_kernel": Fixed(False, False, "a quantized KV cache"),
        "visual": Fixed(None, None, "an image encoder (Qwen-VL)"),
        "audio": Fixed(None, None, "an audio encoder (Qwen-Audio)"),
    },
    known=(
        *("kv_channels", "seq_length", "use_dynamic_ntk", "use_logn_attn", "rotary_emb_base", "rope_theta"),
        *("bf16", "fp16", "fp32", "params_dtype"),
        *("attn_dropout_prob", "emb_dropout_prob", "initializer_range", "onnx_safe", "use_cache", "use_flash_attn"),
        *("softmax_in_fp32", "padded_vocab_size", "tokenizer_type"),
        *("eos_token_id", "bos_token_id", "pad_token_id"),  # the original code ends at tokens of its tokenizer
    ),
    complete=_complete_qwen,
    names={
        "model.embed_tokens": "transformer.wte",
        "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
        **dict.fromkeys(_QUERIES_KEYS_VALUES, "attn.c_attn"),
        "self_attn.o_proj": "attn.c_proj",
        # The original multiplies w1(x) by silu(w2(x)).
        "mlp.up_proj": "mlp.w1",
        "mlp.gate_proj": "mlp.w2",
        "mlp.down_proj": "mlp.c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
    },
    other_release=OtherRelease(
        fields=("n_embd", "n_layer", "ffn_hidden_size"),  # August 2023
        problem="fields of Qwen's first release (n_embd, n_layer)",
        expected="hidden_size and num_hidden_layers",
        advice="download it again",
    ),
)

FAMILIES = {"chatglm": _CHATGLM, "internlm": _INTERNLM, "qwen": _QWEN}
assert set(FAMILIES) == set(CONVERTED_TYPES)
