"""Tolerance: how far a graph's logits may be off before rounding no longer explains it."""

from __future__ import annotations

# Largest difference, relative to the largest logit of the call and at least absolutely, that rounding explains:
# measured are 1e-6 to 1e-5 in float32 and 1e-3 to 1e-2 in float16, against 0.4 and more for one wrong mask bit.
# bfloat16 has three bits less than float16.
TOLERANCE = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 1e-1}
