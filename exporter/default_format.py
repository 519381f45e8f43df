"""Default format: the data types of an export whose user names none, for the class of the CPU that will run it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spaceport.exporter.checkpoint_source import model_config, model_without_values
from spaceport.graphs.contract.signature import Precision, Weights
from spaceport.graphs.quantize import integer_modules
from spaceport.graphs.traits import class_name

# Classes of CPUs, as runtime.backends.machine names them, whose int8 products are exact -> how fast these are, as far as measured: docs/quantization.md
_INT8_SPEED = {
    "AMX": "steps of one row take half as long as in float32 or less",
    "VNNI without AMX": "steps of one row take half as long as in float32 or less",
    "AVX2 without VNNI": "steps of one row take half as long as in float32",
    "AVX512 without VNNI": "speed not measured on such a CPU",
    "ARM64 with 8-bit dot products": "speed not measured on such a CPU",
}
_ACCURACY = "97 % of SmolLM2-135M's tokens are those of float32; --weights same keeps float32"

# With two million weights, a step takes as long in int8 as in float32; accuracy is measured from 135 million on.
_SMALL = 20_000_000
_LEAST_SHARE = 0.5  # of the weights in layers that int8 quantizes


@dataclass(frozen=True)
class DefaultFormat:
    """Data types of an export, and why these, in one line."""

    dtype: Precision
    weights: Weights
    reason: str


GPU_FORMAT = DefaultFormat("float16", "same", "float16, for a GPU; int4 and float8 are for TensorRT (--weights)")


def default_format(checkpoint: Path, cpu_class: str, remote_code: bool = False) -> DefaultFormat:
    """The format for CPUs of a class: int8 where that is fast and its accuracy is known, otherwise float32.

    int4 is never chosen: it is smaller, but loses much quality. The checkpoint's weights are not read."""
    if cpu_class not in _INT8_SPEED:
        return _float32(f"int8 is not measured on this class of CPU ({cpu_class})")
    model = model_without_values(model_config(checkpoint, remote_code), "float32")
    weights = {id(weight): weight.numel() for weight in model.parameters()}
    total = sum(weights.values())
    quantized = sum(weights[name] for name in {id(module.weight) for module in integer_modules(model).values()})
    if total < _SMALL:
        return _float32(f"int8 gains nothing in a model of {total / 1e6:.1f} million weights")
    if quantized < _LEAST_SHARE * total:
        return _float32(f"int8 would hold only {quantized / total:.0%} of the weights of {class_name(model)}")
    return DefaultFormat("float32", "int8", f"weights int8 for {cpu_class}: {_INT8_SPEED[cpu_class]}; {_ACCURACY}")


def _float32(reason: str) -> DefaultFormat:
    return DefaultFormat("float32", "same", f"weights float32: {reason}; --weights int8 quantizes nevertheless")
