"""Formats: the number formats of a bundle by name, each with what it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spaceport.graphs.contract.signature import LOWERINGS, PRECISIONS, KvCache, Lowering, Precision

# How the weights of linear layers are stored: in the type of the graph ("same"), in the codes of a GGUF file ("stored"),
# or rounded to fewer bits.
Weights = Literal["same", "stored", "int8", "int4", "float8"]


@dataclass(frozen=True)
class Format:
    """How the numbers of a bundle are stored and computed, and what runs it."""

    name: str
    dtype: Precision  # of everything that is not stored smaller
    weights: Weights
    # Whether the operators of `spaceport.kernels` compute its products: weights in blocks of 32 inputs, the inputs of
    # products rounded to 8 bits in such blocks, keys and values of 8 bits with a scale for each slot and head.
    native: bool
    lowerings: tuple[Lowering, ...]  # the default first
    backends: tuple[str, ...]
    purpose: str

    @property
    def kv_cache(self) -> KvCache:
        return "int8" if self.native else "same"


_CPU = ("onnxruntime",)
_TENSORRT = ("tensorrt", "tensorrt-rtx")
_GPUS = (*_TENSORRT, "onnxruntime-cuda")


def _native(weights: Weights, purpose: str) -> Format:
    return Format(weights, "float32", weights, True, ("scatter",), _CPU, purpose)


def _plain(dtype: Precision, purpose: str) -> Format:
    # ONNX Runtime has no matrix product in bfloat16 for CPUs
    return Format(dtype, dtype, "same", False, LOWERINGS, _GPUS if dtype == "bfloat16" else (*_GPUS, *_CPU), purpose)


def _smaller(dtype: Precision, weights: Weights, purpose: str) -> Format:
    """Weights that TensorRT reads in fewer bits; ONNX Runtime unpacks them in every step, to compare results."""
    backends = _TENSORRT if dtype == "bfloat16" else (*_TENSORRT, *_CPU)
    return Format(f"{dtype}-{weights}", dtype, weights, False, ("append",), backends, purpose)


_SMALLER: dict[Weights, str] = {
    "int8": "half of the memory",
    "int4": "a quarter of the memory",
    "float8": "half of the memory, from sm89 on",
}
FORMATS = {
    each.name: each
    for each in (
        _native("stored", "CPUs: the weights of a quantized GGUF file, exactly as it stores them"),
        _native("int4", "CPUs: the fastest steps, for models from about 0.3 billion weights on"),
        _native("int8", "CPUs: closer to float32, for models of less than 0.3 billion weights"),
        _plain("float32", "references, tiny models, and families without native operators"),
        _plain("float16", "GPUs"),
        _plain("bfloat16", "GPUs, for models whose values exceed the range of float16"),
        *(
            _smaller(dtype, weights, f"GPUs with TensorRT: {purpose}")
            for dtype in PRECISIONS
            if dtype != "float32"
            for weights, purpose in _SMALLER.items()
        ),
    )
}
