"""GGUF hyperparameters: the sizes of a GGUF file's model, compared with the shapes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from spaceport.exporter.gguf_file import GgufFile
from spaceport.exporter.sar_config import CheckpointError

Shape = tuple[int, ...]

_OPTIONAL = (  # tensors of a layer, by the suffix of their names: biases and norms of some architectures
    *("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"),
    *("attn_q_norm.weight", "attn_k_norm.weight"),
    *("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
)


@dataclass(frozen=True)
class Hyperparameters:
    """Sizes of a model, each at least 1."""

    hidden: int
    layers: int
    inner: int  # of the feed-forward layers
    heads: int
    kv_heads: int
    head_dim: int


def hyperparameters_of(file: GgufFile) -> Hyperparameters:
    """The hyperparameters of a file; raise if one is missing or invalid, or if they contradict each other."""
    hidden, heads = _size(file, "embedding_length"), _size(file, "attention.head_count")
    kv_heads = _size(file, "attention.head_count_kv", heads)
    if heads % kv_heads:
        raise _contradiction(file, f"attention.head_count is {heads}", f"a multiple of {kv_heads} key and value heads")
    if "attention.key_length" not in _named(file) and hidden % heads:
        raise _contradiction(file, f"embedding_length is {hidden}", f"a multiple of {heads} heads")
    found = Hyperparameters(
        hidden,
        _size(file, "block_count"),
        _size(file, "feed_forward_length"),
        heads,
        kv_heads,
        _size(file, "attention.key_length", hidden // heads),
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        if (stated := _size(file, key, found.head_dim)) != found.head_dim:
            raise CheckpointError(
                f"{file.path}: {file.architecture}.{key} is {stated}, the head size is {found.head_dim}: expected equal "
                "sizes; export the original checkpoint"
            )
    if found.head_dim % 2:
        raise _contradiction(file, f"the head size is {found.head_dim}", "an even number, for rotary embeddings")
    _size(file, "context_length")
    _check_positive(file, "attention.layer_norm_rms_epsilon")
    if "rope.freq_base" in _named(file):
        _check_positive(file, "rope.freq_base")
    return found


def check_shapes(file: GgufFile, found: Hyperparameters) -> None:
    """Raise if a tensor that the hyperparameters require is missing or has another shape."""
    vocabulary = _size(file, "vocab_size", _vocabulary(file))
    for name, shape in _expected(found, vocabulary):  # not a list: the number of layers may be absurd
        tensor = file.tensors.get(name)
        if tensor is None and (name == "output.weight" or name.endswith(_OPTIONAL)):
            continue
        if tensor is None:
            raise CheckpointError(
                f"{file.path}: tensor {name} is missing: expected the tensors of {found.layers} layers; convert the model again"
            )
        if tensor.shape != shape:
            raise CheckpointError(
                f"{file.path}: tensor {name} has shape {_shown(tensor.shape)}: expected {_shown(shape)} from the "
                "hyperparameters; convert the model again"
            )


def _expected(found: Hyperparameters, vocabulary: int) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of a model's tensors, those of some architectures included; the innermost dimension is the first."""
    hidden, inner = found.hidden, found.inner
    queries, keys = found.heads * found.head_dim, found.kv_heads * found.head_dim
    yield "token_embd.weight", (hidden, vocabulary)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (hidden, vocabulary)
    linear = {
        "attn_q": (hidden, queries),
        "attn_k": (hidden, keys),
        "attn_v": (hidden, keys),
        "attn_output": (queries, hidden),
        "ffn_gate": (hidden, inner),
        "ffn_up": (hidden, inner),
        "ffn_down": (inner, hidden),
    }
    for layer in range(found.layers):
        for name, (width, height) in linear.items():
            yield f"blk.{layer}.{name}.weight", (width, height)
            yield f"blk.{layer}.{name}.bias", (height,)
        for name, size in {"attn_norm": hidden, "ffn_norm": hidden}.items():
            yield f"blk.{layer}.{name}.weight", (size,)
        for name in ("attn_q_norm", "attn_k_norm"):
            yield f"blk.{layer}.{name}.weight", (found.head_dim,)


def _vocabulary(file: GgufFile) -> int:
    """The number of tokens."""
    tokens = file.get("tokens")
    return len(tokens) if isinstance(tokens, list) else 0


def _named(file: GgufFile) -> dict[str, Any]:
    """The hyperparameters by their names without the architecture."""
    prefix = f"{file.architecture}."
    return {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}


def _size(file: GgufFile, key: str, default: int | None = None) -> int:
    value = _named(file).get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _invalid(file, key, value, "a whole number of at least 1")
    return value


def _check_positive(file: GgufFile, key: str) -> None:
    value = _named(file).get(key)
    if not isinstance(value, float) or not (math.isfinite(value) and value > 0):
        raise _invalid(file, key, value, "a floating-point number above 0")


def _invalid(file: GgufFile, key: str, value: Any, expected: str) -> CheckpointError:
    found = "is missing" if value is None else "is an array" if isinstance(value, list) else f"is {_shown(value)}"
    return CheckpointError(
        f"{file.path}: {file.architecture}.{key} {found}: expected {expected}; convert the model again"
    )


def _contradiction(file: GgufFile, found: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{file.path}: {found}: expected {expected}; convert the model again")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
