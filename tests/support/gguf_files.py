"""GGUF files: writes tiny models with the gguf package, as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from support.paths import TINY

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 256, 4, 2, 16  # rows of 256 fit the blocks of K-quants
CONTROL, NORMAL = 3, 1  # token types
# Offsets of the float16 scales in a block, by type.
SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
}
_RANDOM = ("Q4_K", "Q5_K", "Q6_K")  # types that the package cannot quantize

_NAMES = get_tensor_name_map(MODEL_ARCH.QWEN3, 2)  # Llama and Qwen2 have a part of its tensors


def random_model(family: str = "llama", tied: bool = True) -> PreTrainedModel:
    """A seeded random model for the tiny tokenizer, with norms and biases that differ from their initial values."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(AutoTokenizer.from_pretrained(TINY)),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def gguf_name(name: str) -> str:
    """The name of a tensor in a GGUF file."""
    found = _NAMES.get_name(name, (".weight", ".bias"))
    assert found is not None
    return found


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in llama.cpp's order: the two halves of a head alternate."""
    rows: np.ndarray = weight.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(weight.shape)
    return rows


def stored_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The tensors of a model by their GGUF names, in llama.cpp's layout."""
    found = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy().astype(np.float32)
        if model.config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleaved(weight, HEADS if "q_proj" in name else KV_HEADS)
        found[gguf_name(name)] = weight
    return found


def random_blocks(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random bytes of a type of blocks with small finite scales."""
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = np.random.default_rng(seed).integers(0, 256, (shape[0] * shape[1] // weights, size), np.uint8)
    for offset in SCALES[kind]:
        scale = np.random.default_rng(seed + 1).uniform(1e-4, 1e-3, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(shape[0], -1)


def metadata_of(model: PreTrainedModel) -> dict[str, Any]:
    """Hyperparameters as llama.cpp's converter writes them."""
    config, arch = model.config, model.config.model_type
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if arch == "llama":
        values |= {"vocab_size": config.vocab_size, "rope.dimension_count": HEAD_DIM}
    return {f"{arch}.{key}": value for key, value in values.items()}


def tokenizer_metadata() -> dict[str, Any]:
    """The tiny tokenizer as llama.cpp's converter writes it."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    backend: Tokenizer = tokenizer.backend_tokenizer
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(id for id, token in added if token.special)}
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [backend.id_to_token(token) for token in range(len(tokenizer))],
        "tokenizer.ggml.token_type": [CONTROL if token in special else NORMAL for token in range(len(tokenizer))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    types: Mapping[str, str] | None = None,
    changes: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a model as a GGUF file.

    `types` are tensor types by name, F32 otherwise. `changes` replace metadata; None removes an entry. `tensors` are added.
    """
    writer = GGUFWriter(file, model.config.model_type)
    values = {**metadata_of(model), **tokenizer_metadata(), **(changes or {})}
    add: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    for key, value in values.items():
        if value is not None:
            add[type(value)](key, value)
    for seed, (name, weight) in enumerate({**stored_tensors(model), **(tensors or {})}.items()):
        kind = (types or {}).get(name, "F32")
        if kind in _RANDOM:
            writer.add_tensor(name, random_blocks(kind, weight.shape, seed), raw_dtype=GGMLQuantizationType[kind])
        elif kind == "F32":
            writer.add_tensor(name, weight)
        else:
            wanted = GGMLQuantizationType[kind]
            writer.add_tensor(name, quants.quantize(weight, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
