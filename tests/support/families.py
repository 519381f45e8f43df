"""Families: tiny random models of each kind that can be exported, and of those that must be refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from spaceport.exporter.to_onnx import to_onnx
from spaceport.graphs.contract.manifest import MODEL_FILE
from spaceport.graphs.contract.signature import LOWERINGS, Lowering, Signature
from spaceport.graphs.decoder import Decoder, decoder_of
from support.cache import built

VOCAB = 97
POSITIONS = 192
WINDOW = 16  # far shorter than the sequences

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# Structures of families that tests tell apart: each is a branch in graphs/ and exporter/.
Structure = Literal[
    "usual",
    "experts",  # mixture of experts, in the form whose graph does not depend on the routing
    "softcap",  # limited scores: no fused kernel in TensorRT
    "scaled_dot_product",  # attention replaced in torch; KV heads repeated before they are cached
    "eager",  # attention that cannot be replaced
]


@dataclass(frozen=True)
class Family:
    """A model family: its model_type and its configuration beyond the tiny sizes."""

    name: str
    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    lowerings: tuple[Lowering, ...] = LOWERINGS
    each_run: Lowering | None = None  # with which every run of the tests exports it, for its structure
    structure: Structure = "usual"

    @property
    def replaceable(self) -> bool:
        """Whether its attention can be replaced; otherwise the graph has no Attention operator."""
        return self.structure != "eager"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Refused:
    """A family that cannot be exported exactly."""

    family: Family
    reason: str  # a pattern of the error

    def __str__(self) -> str:
        return self.family.name


def family_of(name: str) -> Family:
    (family,) = (family for family in FAMILIES if family.name == name)
    return family


def build(family: Family, dtype: torch.dtype = torch.float32, attention: str | None = None) -> PreTrainedModel:
    """A seeded model with weights so large that every token of the context changes the logits."""
    config = AutoConfig.for_model(family.model_type, **{**TINY, **family.options})
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    dice = torch.Generator().manual_seed(7)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        model: PreTrainedModel = kind.from_config(config, dtype=dtype, attn_implementation=attention)
        for parameter in model.parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=dice)
            # vectors are norms and biases: they stay near their values
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    model.eval()
    return model


def decoder_for(family: Family, model: PreTrainedModel, lowering: Lowering) -> Decoder:
    """A model of a family as an exportable module."""
    form = "operator" if lowering == "append" and family.replaceable else "plain"
    return decoder_of(model, lowering, form)[0]


def graph_of(family: Family, model: PreTrainedModel, lowering: Lowering) -> tuple[Path, Signature]:
    """The ONNX file of a model of a family, and its signature."""
    made_from = (repr(model.config), [tensor.numpy().tobytes() for tensor in model.state_dict().values()], lowering)
    decoder = decoder_for(family, model, lowering)

    def make(folder: Path) -> None:
        folder.mkdir()
        to_onnx(decoder, folder)

    return built(f"graph-{family.model_type}", made_from, make) / MODEL_FILE, decoder.signature


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """The rotary embedding of a configuration."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


GROUPED = {"num_key_value_heads": 2}
ROPE_ONLY = {"num_key_value_heads": 2, "num_hidden_layers": 1}  # families that differ before the KV cache only
WIDE = {"num_key_value_heads": 2, "head_dim": 16}  # heads times head_dim is twice the hidden size
SLIDING = {"sliding_window": WINDOW}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GRANITE = {"attention_multiplier": 0.3, "residual_multiplier": 0.5}
YARN = {"factor": 4.0, "original_max_position_embeddings": 48}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
FALCON_7B = {"multi_query": True, "new_decoder_architecture": False, "bias": False}
FALCON_40B = {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": False}
SOFTCAP = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": POSITIONS}

FAMILIES = (
    Family("llama", "llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}, each_run="scatter"),
    Family("llama, llama3 rope", "llama", ROPE_ONLY | rope("llama3", **LLAMA3)),
    Family("llama, linear rope", "llama", ROPE_ONLY | rope("linear", factor=4.0)),
    Family("llama, dynamic rope", "llama", ROPE_ONLY | rope("dynamic", factor=4.0)),
    Family("llama, yarn rope", "llama", ROPE_ONLY | rope("yarn", **YARN)),
    Family("qwen2", "qwen2", {**GROUPED, **SLIDING, "use_sliding_window": True, "max_window_layers": 1}),
    Family("qwen3", "qwen3", WIDE),
    Family("mistral", "mistral", WIDE | SLIDING, each_run="scatter"),
    Family("ministral3", "ministral3", WIDE | rope("yarn", **YARN, llama_4_scaling_beta=0.1)),
    Family("phi3", "phi3", GROUPED | SLIDING),
    Family(
        "phi3, longrope",
        "phi3",
        {**GROUPED, "max_position_embeddings": 640, "original_max_position_embeddings": 160}
        | rope("longrope", factor=4.0, short_factor=[1.0, 1.1, 1.3, 1.7], long_factor=[2.0, 3.0, 5.0, 9.0]),
        each_run="scatter",
    ),
    Family("gemma2", "gemma2", {**WIDE, **SLIDING, **SOFTCAP}, each_run="append", structure="softcap"),
    Family("gemma3", "gemma3_text", {**WIDE, **MIXED, "query_pre_attn_scalar": 16}),
    Family("glm", "glm", WIDE),
    Family("glm4", "glm4", WIDE),
    Family("gpt_neox", "gpt_neox", each_run="append"),
    Family("falcon, 7B style", "falcon", FALCON_7B, structure="scaled_dot_product"),
    Family("falcon, 40B style", "falcon", FALCON_40B, each_run="scatter", structure="scaled_dot_product"),
    Family("opt", "opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    Family("olmo2", "olmo2", GROUPED),
    Family("internlm3", "internlm3", {**WIDE, "bias": True, "qkv_bias": True}),
    # Near relatives of those above: one lowering each.
    Family("gemma", "gemma", WIDE, ("append",)),
    Family("gpt2", "gpt2", GPT2, ("scatter",)),
    Family("gptj", "gptj", {**GPT2, "rotary_dim": 4}, ("append",), each_run="append", structure="eager"),
    Family("granite", "granite", GROUPED | GRANITE, ("scatter",)),
    Family("cohere", "cohere", {**GROUPED, "use_qk_norm": True, "logit_scale": 1.0}, ("append",)),
    Family("stablelm", "stablelm", {**GROUPED, "use_qkv_bias": True, "qk_layernorm": True}, ("scatter",)),
    Family("starcoder2", "starcoder2", GROUPED | SLIDING, ("append",)),
    Family("smollm3", "smollm3", {**GROUPED, "no_rope_layers": [1, 0]}, ("scatter",)),
    Family("phi", "phi", {**GROUPED, "qk_layernorm": True}, ("append",)),
    Family("qwen3_moe", "qwen3_moe", WIDE | EXPERTS, ("scatter",), structure="experts"),
    Family(
        "qwen2_moe",
        "qwen2_moe",
        {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1},
        ("scatter",),
        structure="experts",
    ),
    Family(
        "mixtral", "mixtral", {**GROUPED, "num_local_experts": 4}, ("append",), each_run="append", structure="experts"
    ),
)

NOT_DECODER = "not a decoder-only causal language model"
NOT_ATTENTION = "expected full or sliding-window attention only"
NO_POSITIONS = "takes no position_ids"
SHAPES = "keys and values of shapes"

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 2}  # of attention
DEEPSEEK_V2 = {"moe_intermediate_size": 24, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
DEEPSEEK_V3 = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
GEMMA3N: dict[str, Any] = {
    **WIDE,
    **SLIDING,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 640,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * 4,
}
GEMMA4 = {**WIDE, **MIXED, "global_head_dim": 32, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
HYBRID = ["linear_attention", "full_attention"]


def refused(name: str, reason: str, model_type: str | None = None, **options: Any) -> Refused:
    return Refused(Family(name, model_type or name, options), reason)


REFUSED = (
    refused("t5", NOT_DECODER),
    refused("bart", NOT_DECODER, encoder_layers=1, decoder_layers=1),
    refused("mamba", NOT_ATTENTION),
    refused("rwkv", NO_POSITIONS),
    refused("qwen3_next", f"linear_attention: {NOT_ATTENTION}", layer_types=HYBRID, **WIDE, **EXPERTS),
    refused("lfm2", f"conv: {NOT_ATTENTION}", layer_types=["conv", "full_attention"], **GROUPED),
    refused(
        "llama4",
        f"chunked_attention: {NOT_ATTENTION}",
        "llama4_text",
        num_local_experts=2,
        intermediate_size_mlp=48,
        **WIDE,
    ),
    refused("bloom", NO_POSITIONS, n_layer=2, n_head=4),
    refused("mpt", NO_POSITIONS, d_model=32, n_heads=4, n_layers=2),
    refused("falcon, alibi", NO_POSITIONS, "falcon", alibi=True, new_decoder_architecture=False),
    refused(
        "gpt_neo",
        "depends on more than positions and visibility",
        num_layers=2,
        num_heads=4,
        attention_types=[[["global"], 2]],
    ),
    refused("gpt_oss", "its attention takes s_aux", num_local_experts=4, **WIDE, **SLIDING),
    refused("gemma3n", r"cached keys and values in layers \[0, 1\] of 4", "gemma3n_text", **GEMMA3N),
    refused("gemma4", SHAPES, "gemma4_text", **GEMMA4),
    refused("deepseek_v3", SHAPES, **LATENT, **DEEPSEEK_V3),
    refused("deepseek_v2", SHAPES, **LATENT, **DEEPSEEK_V2),
    refused("openai-gpt", "has no KV cache", n_embd=32, n_layer=2, n_head=4),
    refused("bert", r"is an encoder, .*is_decoder is false"),
    refused(
        "phimoe, window", "no layer passes a window to attention", "phimoe", num_local_experts=4, **GROUPED, **SLIDING
    ),
)
