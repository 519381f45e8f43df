"""Configuration, tokenizer and weights of a GGUF file, each compared with its metadata.

transformers can load them too, but it reads the file twice, ignores some pre-tokenizers and may add tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from spaceport.exporter.gguf_file import GgufFile
from spaceport.exporter.tokenizer_models import (
    LLAMA3_PATTERN,
    QWEN_PATTERN,
    add_tokens,
    begin_texts,
    byte_level_splitter,
    byte_level_tokenizer,
    transformers_tokenizer,
)
from spaceport.graphs.contract.faults import CheckpointError
from spaceport.graphs.contract.json_fields import short

# Tensors by name: the module of transformers, and the sizes of its weight, the innermost dimension first
_MODEL: dict[str, tuple[str, ...]] = {
    "token_embd": ("model.embed_tokens", "hidden", "vocabulary"),
    "output_norm": ("model.norm", "hidden"),
    "output": ("lm_head", "hidden", "vocabulary"),  # missing: tied to the embeddings
}
_LAYER: dict[str, tuple[str, ...]] = {
    "attn_q": ("self_attn.q_proj", "hidden", "queries"),
    "attn_k": ("self_attn.k_proj", "hidden", "keys"),
    "attn_v": ("self_attn.v_proj", "hidden", "keys"),
    "attn_output": ("self_attn.o_proj", "queries", "hidden"),
    "ffn_gate": ("mlp.gate_proj", "hidden", "inner"),
    "ffn_up": ("mlp.up_proj", "hidden", "inner"),
    "ffn_down": ("mlp.down_proj", "inner", "hidden"),
    "attn_norm": ("input_layernorm", "hidden"),
    "ffn_norm": ("post_attention_layernorm", "hidden"),
}
# further ones in the layers of Qwen3
_QWEN3: dict[str, tuple[str, ...]] = {f"attn_{part}_norm": (f"self_attn.{part}_norm", "head_dim") for part in "qk"}
MODULES = {name: module for name, (module, *_) in (_MODEL | _LAYER | _QWEN3).items()}
# Hyperparameters that are read, or must be equal to others.
_HYPERPARAMETERS = {
    *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base"),
}

# How text is split, by llama.cpp's names of pre-tokenizers: the pattern, and whether that of GPT-2 follows
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe")  # a word that is a token is not merged; BOS is added by default
_SPLITS: dict[str, tuple[str | None, bool]] = {
    **dict.fromkeys(_LLAMA3, (LLAMA3_PATTERN, False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (QWEN_PATTERN, False)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe"), (None, True)),
    # each digit on its own
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", True)),
}
_CONTROL, _USER_DEFINED = 3, 4  # token types of llama.cpp

_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
_END = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of a turn, of a message


def _sizes_of(file: GgufFile) -> dict[str, int]:
    """The sizes of a model by their names in transformers; raise if one is missing, or if they contradict each other."""
    hidden, heads = _size(file, "embedding_length"), _size(file, "attention.head_count")
    kv_heads = _size(file, "attention.head_count_kv", heads)
    if heads % kv_heads:
        file.refuse(f"attention.head_count is {heads}", f"a multiple of {kv_heads} key and value heads")
    if _stated(file, "attention.key_length") is None and hidden % heads:
        file.refuse(f"embedding_length is {hidden}", f"a multiple of {heads} heads")
    head_dim = _size(file, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (stated := _size(file, key, head_dim)) != head_dim:
            file.refuse(
                f"{file.architecture}.{key} is {stated}, the head size is {head_dim}",
                "equal sizes",
                "export the original checkpoint",
            )
    if head_dim % 2:
        file.refuse(f"the head size is {head_dim}", "an even number, for rotary embeddings")
    tokens = file.get("tokens")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": _size(file, "block_count"),
        "intermediate_size": _size(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": _size(file, "context_length"),
        "vocab_size": _size(file, "vocab_size", len(tokens) if isinstance(tokens, list) else 0),
    }


def _check_names(file: GgufFile) -> None:
    """Raise for other hyperparameters, such as RoPE scaling."""
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{file.architecture}.")
        if name != key and name not in _HYPERPARAMETERS and (name, value) != ("rope.scaling.type", "none"):
            file.refuse(
                f"{key} is {short(value)}, which cannot be loaded from GGUF files",
                "a model without it",
                "export the original checkpoint",
            )


def _check_shapes(file: GgufFile, sizes: Mapping[str, int]) -> None:
    """Raise if a tensor that the sizes require is missing or has another shape, and for other tensors."""
    unknown = set(file.tensors)
    for name, shape in _shapes(file.architecture, sizes):  # no list: the number of layers may be absurd
        tensor = file.tensors.get(name)
        if tensor is None and name != "output.weight":
            file.refuse(f"tensor {name} is missing", f"the tensors of {sizes['num_hidden_layers']} layers")
        if tensor is not None and tensor.shape != shape:
            file.refuse(f"tensor {name} has shape {short(tensor.shape)}", f"{short(shape)} from the hyperparameters")
        unknown.discard(name)
    if unknown:  # such as RoPE factors
        file.refuse(
            f"tensor {min(unknown)} has no counterpart in a {file.architecture} model of transformers",
            "none but its weights",
            "export the original checkpoint",
        )


def _shapes(architecture: str, sizes: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a model's tensors."""
    dimensions = {
        "hidden": sizes["hidden_size"],
        "inner": sizes["intermediate_size"],
        "head_dim": sizes["head_dim"],
        "queries": sizes["num_attention_heads"] * sizes["head_dim"],
        "keys": sizes["num_key_value_heads"] * sizes["head_dim"],
        "vocabulary": sizes["vocab_size"],
    }
    for name, (_, *shape) in _MODEL.items():
        yield f"{name}.weight", tuple(dimensions[dimension] for dimension in shape)
    in_layer = _LAYER | (_QWEN3 if architecture == "qwen3" else {})
    for layer in range(sizes["num_hidden_layers"]):
        for name, (_, *shape) in in_layer.items():
            yield f"blk.{layer}.{name}.weight", tuple(dimensions[dimension] for dimension in shape)
        for name in ("attn_q", "attn_k", "attn_v") if architecture == "qwen2" else ():
            yield f"blk.{layer}.{name}.bias", (dimensions[_LAYER[name][-1]],)


def _stated(file: GgufFile, key: str, default: int | None = None) -> Any:
    return file.metadata.get(f"{file.architecture}.{key}", default)


def _size(file: GgufFile, key: str, default: int | None = None) -> int:
    value = _stated(file, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _refuse_value(file, key, value, "a whole number of at least 1")
    return value


def _positive(file: GgufFile, key: str) -> float:
    value = _stated(file, key)
    if not isinstance(value, float) or not (math.isfinite(value) and value > 0):
        _refuse_value(file, key, value, "a floating-point number above 0")
    return value


def _refuse_value(file: GgufFile, key: str, value: Any, expected: str) -> NoReturn:
    problem = "is missing" if value is None else "is an array" if isinstance(value, list) else f"is {short(value)}"
    file.refuse(f"{file.architecture}.{key} {problem}", expected)


def gguf_config(file: GgufFile) -> PreTrainedConfig:
    """The configuration of a GGUF file's model; raise if it does not fit the file's tensors."""
    _check_names(file)
    sizes, epsilon = _sizes_of(file), _positive(file, "attention.layer_norm_rms_epsilon")
    stated: dict[str, Any] = {f"{role}_token_id": file.get(key) for role, key in _SPECIAL.items()}
    if _stated(file, "rope.freq_base") is not None:
        stated["rope_parameters"] = {"rope_type": "default", "rope_theta": _positive(file, "rope.freq_base")}
    _check_shapes(file, sizes)
    try:
        return AutoConfig.for_model(
            file.architecture,
            rms_norm_eps=epsilon,
            tie_word_embeddings="output.weight" not in file.tensors,
            **sizes,
            **{name: value for name, value in stated.items() if value is not None},
        )
    except Exception as error:  # each model family raises its own exception types
        raise CheckpointError(
            f"{file.path}: its metadata cannot be loaded ({short(str(error))}): expected that of a {file.architecture} "
            "model; convert the model again"
        ) from error


def gguf_weights(file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The dequantized weights of a model of transformers by name."""
    return {_parameter_name(name): _dequantized(file, name, config).to(dtype) for name in file.tensors}


def _parameter_name(tensor: str) -> str:
    """The name in a model of transformers for a tensor of a file."""
    *block, name, kind = tensor.split(".")
    layer = f"model.layers.{block[1]}." if block else ""
    return f"{layer}{MODULES[name]}.{kind}"


def _dequantized(file: GgufFile, name: str, config: PreTrainedConfig) -> Tensor:
    """The weights of a tensor in float32, in the order of transformers."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    tensor, part = file.tensors[name], name.split(".")[-2]
    data = file.data_of(tensor).reshape(*tensor.shape[:0:-1], -1)
    weights = dequantize(data, GGMLQuantizationType[tensor.kind])
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
    if file.architecture == "llama" and heads is not None:  # llama.cpp orders its rows by rotated pairs
        weights = weights.reshape(heads, -1, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
    return torch.from_numpy(np.require(weights, np.float32, "W"))


def gguf_tokenizer(file: GgufFile) -> Any:
    """The transformers tokenizer of a GGUF file; raise if it cannot be made exactly."""
    _check_kind(file)
    _check_types(file)
    tokens, pre = file.get("tokens"), file.get("pre")
    vocabulary = {text: token for token, text in enumerate(tokens)}
    splitter = byte_level_splitter(*_SPLITS[pre])
    backend = byte_level_tokenizer(vocabulary, _merges(file, vocabulary), splitter, whole_parts=pre in _LLAMA3)
    kinds = file.get("token_type")
    add_tokens(backend, [text for text, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL])
    user_defined = [text for text, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    add_tokens(backend, user_defined, special=False)
    special = {role: tokens[file.get(key)] for role, key in _SPECIAL.items() if file.get(key) is not None}
    if _adds_bos(file):
        begin_texts(backend, (special["bos"],))
    return transformers_tokenizer(backend, special, file.metadata.get("tokenizer.chat_template"))


def end_tokens(file: GgufFile) -> list[int]:
    """Ids of all end-of-text tokens in the file's metadata; the tokenizer refuses what is no id."""
    tokens = [file.get(key) for key in _END]
    return list(dict.fromkeys(token for token in tokens if type(token) is int))


def _check_kind(file: GgufFile) -> None:
    kind, pre = file.get("model"), file.get("pre")
    original = "export the original checkpoint"
    if kind != "gpt2":
        file.refuse(f"tokenizer {kind!r} is not supported in GGUF files", "'gpt2', a byte-level BPE", original)
    if not isinstance(pre, str) or pre not in _SPLITS:
        file.refuse(f"pre-tokenizer {pre!r} is not supported", f"one of {', '.join(_SPLITS)}", original)
    if file.get("add_eos_token", False):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.add_eos_token is true: expected false, prompts would end before the answer"
        )


def _check_types(file: GgufFile) -> None:
    """Raise for values of another type than the tokenizer needs, and for ids that no token has."""
    tokens, kinds = _list(file, "tokens", str), _list(file, "token_type", int)
    _list(file, "merges", str)
    if len(set(tokens)) != len(tokens):
        ((twice, _),) = Counter(tokens).most_common(1)
        file.refuse(f"tokenizer.ggml.tokens has {short(twice)} twice", "different texts")
    if len(kinds) != len(tokens):
        file.refuse(f"tokenizer.ggml.token_type has {len(kinds)} entries", f"one for each of {len(tokens)} tokens")
    for key in dict.fromkeys((*_SPECIAL.values(), *_END)):
        token = file.get(key)
        if token is not None and (type(token) is not int or not 0 <= token < len(tokens)):
            file.refuse(f"tokenizer.ggml.{key} is {short(token)}", f"the id of one of {len(tokens)} tokens")
    for key in ("add_bos_token", "add_eos_token"):
        if type(file.get(key, False)) is not bool:
            file.refuse(f"tokenizer.ggml.{key} is {short(file.get(key))}", "true or false")
    if _adds_bos(file) and file.get("bos_token_id") is None:
        file.refuse("tokenizer.ggml.bos_token_id is missing", "the id of the token that begins a prompt")
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        file.refuse(f"tokenizer.chat_template is {short(template)}", "text")


def _list(file: GgufFile, key: str, kind: type) -> list[Any]:
    """A list in the metadata whose items have this type."""
    items = file.get(key)
    if not isinstance(items, list) or not items or not all(type(item) is kind for item in items):
        file.refuse(f"tokenizer.ggml.{key} is {short(items)}", f"a list of {'texts' if kind is str else 'numbers'}")
    return items


def _merges(file: GgufFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, merge in enumerate(file.get("merges")):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            file.refuse(
                f"tokenizer.ggml.merges has {short(merge)} as entry {number}", "two tokens that make a third one"
            )
        merges.append((left, right))
    return merges


def _adds_bos(file: GgufFile) -> bool:
    return bool(file.get("add_bos_token", file.get("pre") in _LLAMA3))
