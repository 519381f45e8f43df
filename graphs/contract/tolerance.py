"""Tolerance: the largest difference of a graph's logits that floating-point rounding explains."""

from __future__ import annotations

from spaceport.graphs.contract.signature import Activations, Precision

# Largest difference of a logit, relative to the largest logit of the call (at least 1). Measured rounding: 1e-6 to 1e-5
# in float32, 1e-3 to 1e-2 in float16; one wrong mask bit: 0.4 and more. bfloat16 has three bits less than float16.
TOLERANCE: dict[Precision, float] = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 1e-1}

# The same with quantized activations: floating-point noise of 1e-6 then moves a value to the next quantization step
# here and there. A step is 1/127 of the input's range with one limb, 1/32512 with two. Measured with two limbs: 2e-3 in
# small models, 1e-2 on rows of mask slots in SmolLM2-135M, whose largest activations are far above the others; with one
# limb: 7e-2 on most rows of random tokens in that model, 1.2e-1 on the worst.
QUANTIZED_TOLERANCE: dict[Activations, float] = {"int8": 2e-1, "int8x2": 2e-2, "float": 0.0}


def tolerance_of(dtype: Precision, activations: Activations = "float") -> float:
    """The largest difference that rounding explains, relative to the largest logit."""
    return max(TOLERANCE[dtype], QUANTIZED_TOLERANCE[activations])
