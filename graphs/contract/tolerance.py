"""Tolerance: how far a graph's logits may be off before rounding no longer explains it."""

from __future__ import annotations

from spaceport.graphs.contract.signature import Activations, Precision

# Largest difference, relative to the largest logit of the call and at least absolutely, that rounding explains:
# measured are 1e-6 to 1e-5 in float32 and 1e-3 to 1e-2 in float16, against 0.4 and more for one wrong mask bit.
# bfloat16 has three bits less than float16.
TOLERANCE: dict[Precision, float] = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 1e-1}

# The same where inputs are rounded to integers: float noise of 1e-6 then flips a rounding here and there, by a step of 1/127 of
# the input's range with one limb and of 1/32512 with two.
QUANTIZED_TOLERANCE: dict[Activations, float] = {"int8": 1e-1, "int8x2": 2e-3, "float": 0.0}


def tolerance_of(dtype: Precision, activations: Activations = "float") -> float:
    """The largest difference, as a share of the largest logit, that rounding explains."""
    return max(TOLERANCE[dtype], QUANTIZED_TOLERANCE[activations])
