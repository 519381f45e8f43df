"""Exactness of an engine: whether drafts leave the text unchanged, and which differences of logits rounding explains."""

from __future__ import annotations

from dataclasses import dataclass

from spaceport.graphs.contract.manifest import Manifest
from spaceport.graphs.contract.signature import Precision

# Largest difference of a logit, relative to the largest logit of the call (at least 1). Measured rounding: 1e-6 to 1e-5
# in float32, 1e-3 to 1e-2 in float16; one wrong mask bit: 0.4 and more. bfloat16 has three bits less than float16.
TOLERANCE: dict[Precision, float] = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 1e-1}

# The same where inputs of products are rounded to 8 bits: floating-point noise of 1e-6 then moves a value to the next of
# 127 steps here and there. Measured on random weights of the tests' families, which amplify it most: 2e-2 on half of the
# rows, 1e-1 on most others, 1.7e-1 on the worst. A fault in every row is below that, but not below the largest mean
# error of all rows and logits; measured: 3e-3 to 8e-3, and with experts 7e-3 to 1.4e-2.
NATIVE_TOLERANCE, NATIVE_MEAN = 2e-1, 2e-2

# The largest share of rows beyond the tolerance where rows choose experts: two experts of about the same share change
# places by rounding, and what the other one adds is another vector. Measured: up to 4 % of the rows.
OTHER_EXPERTS = 8e-2


def tolerance_of(dtype: Precision, native: bool = False) -> float:
    """The largest difference that rounding explains, relative to the largest logit."""
    return max(TOLERANCE[dtype], NATIVE_TOLERANCE if native else 0.0)


# Noise up to these values, relative to the largest logit, changes a token only where two are nearly tied. Measured with
# KV slots in another order: 1e-6 in float32, 1e-4 in float16; bfloat16 has three bits less.
_NEAR_TIES: dict[Precision, float] = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
# The same on GPUs, whose products add up in another order for another number of rows. Emulated on a CPU with float16
# weights: 1e-3 to 4.1e-3, of which none changed one of 192 tokens; not measured on a GPU yet.
_NEAR_TIES_ON_GPU: dict[Precision, float] = {"float32": 1e-5, "float16": 8e-3, "bfloat16": 6.4e-2}


@dataclass(frozen=True)
class Exactness:
    """The largest changes of a logit, relative to the largest logit of its row; 0 = bit-identical."""

    rows: float  # with the number of rows in a call
    slots: float  # with the order of the KV slots that a row sees
    # noise that changes nothing but near-ties; 0 with native operators, whose rounding amplifies any noise
    tolerated: float
    widths: tuple[int, ...] = ()  # numbers of rows that were compared with one row; empty: nothing was measured

    def __post_init__(self) -> None:
        if not all(0 <= noise < float("inf") for noise in (self.rows, self.slots, self.tolerated)):
            raise ValueError("exactness: expected noise of at least 0")

    @property
    def allows_drafts(self) -> bool:
        """Whether drafts and threads that decode at the same time leave the text unchanged, so that they are the default."""
        return max(self.rows, self.slots) <= self.tolerated

    @property
    def guarantee(self) -> str:
        """What drafts leave unchanged, in words."""
        noise = max(self.rows, self.slots)
        if not self.widths:
            return "not measured"
        if not self.allows_drafts:
            return f"not exact (noise {noise:.0e} with other rows and KV slots)"
        return f"equal unless two tokens are equally likely (within {noise:.0e})" if noise else "bit-identical"

    def __str__(self) -> str:
        drafts = "draft trees, threads in parallel" if self.allows_drafts else "no drafts unless they are requested"
        return f"{self.guarantee}: {drafts}"


def tolerated_noise(manifest: Manifest, device: str) -> float:
    """The noise that changes nothing but near-ties in the text of a bundle on a device."""
    if manifest.native:
        return 0.0
    return (_NEAR_TIES if device == "cpu" else _NEAR_TIES_ON_GPU)[manifest.signature.dtype]


def unmeasured(manifest: Manifest) -> Exactness:
    """What is usual for a bundle, for engines that are not asked: only native operators give the same bits in any slots."""
    return Exactness(0.0, 0.0 if manifest.signature.has_scales else 1e-6, tolerated_noise(manifest, "cpu"))
