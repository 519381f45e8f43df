"""Int8: linear layers as integer products: what their weights and their inputs are rounded to.

A sum of integers does not depend on its order, so neither other rows nor the choice of a kernel can change a product.
Inputs are rounded to one or two limbs of 8 bits: with one, the float noise of attention flips a rounding here and there and
is multiplied by it; with two, the steps are 256 times finer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

MOST = 127  # largest magnitude of a weight, and of the high limb of an input within its bound
LIMB = 256  # steps of the low limb in one of the high limb: a power of two, so that joining the limbs rounds once
ZERO = 128  # an input's limbs are stored as unsigned bytes around it
NEVER_ZERO = 1e-30  # added to the size of a row, so that a row of zeros can be divided by it


@dataclass(frozen=True, eq=False)
class InputScale:
    """How the input of a product is scaled before it is rounded."""

    # Largest magnitude that is kept, once `move` was divided by. None: each row is divided by its own size first.
    bound: float | None
    move: Tensor | None = None  # float32, inputs: a channel is divided by it, and its weights are multiplied by it

    def row_bound(self, inputs: int, limbs: int) -> float:
        """The largest magnitude of a row that was divided by its own size."""
        if limbs == 1:
            return 1.0
        return math.sqrt(inputs) * (1.0 if self.move is None else float((1 / self.move).max()))


@dataclass(frozen=True, eq=False)
class IntegerProduct:
    """A linear layer as a product of integers."""

    codes: Tensor  # int8, inputs x outputs
    scale: Tensor  # float32, outputs
    input: InputScale

    @property
    def values(self) -> Tensor:
        """The weight that the product multiplies by: inputs x outputs, float32."""
        values = self.codes.float() * self.scale
        return values if self.input.move is None else values / self.input.move[:, None]


@dataclass(frozen=True, eq=False)
class IntegerTable:
    """An embedding table in int8 with a scale per token."""

    codes: Tensor  # int8, tokens x width
    scale: Tensor  # float32, tokens

    @property
    def values(self) -> Tensor:
        return self.codes.float() * self.scale[:, None]


@dataclass(frozen=True)
class IntegerModel:
    """The products and tables of a model that are integers."""

    limbs: int  # of the inputs
    products: Mapping[str, IntegerProduct] = field(default_factory=dict)  # by the names of the linear modules
    table: IntegerTable | None = None  # its input embedding
    tied: bool = False  # the output embedding has the codes of the table

    @property
    def weights(self) -> int:
        """Number of weights that are stored in int8."""
        table = self.table.codes.numel() if self.table is not None and not self.tied else 0
        return table + sum(product.codes.numel() for product in self.products.values())


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of a matrix, int8, and the scale of each of its rows.

    No weight is cut off: the largest ones matter more than the others' finer steps (mean KL of a 135M model: 0.0038, with
    scales of the smallest squared error 0.0043).
    """
    rows = weight.float()
    scale = (rows.abs().amax(dim=1) / MOST).clamp(min=torch.finfo(torch.float32).tiny)
    return (rows / scale[:, None]).round_().clamp_(-MOST, MOST).to(torch.int8), scale


def round_product(weight: Tensor, scale: InputScale) -> IntegerProduct:
    """A linear layer's weight (outputs x inputs) as a product of integers."""
    moved = weight.float() if scale.move is None else weight.float() * scale.move
    codes, outputs = round_rows(moved)
    return IntegerProduct(codes.T.contiguous(), outputs, scale)


def round_input(states: Tensor, scale: InputScale, limbs: int) -> tuple[Tensor, int]:
    """Rows (the last axis holds the inputs) as an integer product takes them, and the number of values that were cut off."""
    moved = states if scale.move is None else states / scale.move
    if scale.bound is not None:
        rounded = _limbs(moved, scale.bound, limbs)
        cut = int((moved.abs() > scale.bound * (1 + 1 / LIMB)).sum())
    else:
        size = row_size(states if limbs == 2 else moved, limbs)
        rounded = _limbs(moved / size, scale.row_bound(states.shape[-1], limbs), limbs) * size
        cut = 0
    return (rounded if scale.move is None else rounded * scale.move), cut


def row_size(states: Tensor, limbs: int) -> Tensor:
    """What each row is divided by: its root mean square, which takes fewer operators, or where 8 bits must do its largest
    magnitude."""
    if limbs == 2:
        return (states.square().mean(dim=-1, keepdim=True) + NEVER_ZERO).sqrt()
    return states.abs().amax(dim=-1, keepdim=True).clamp(min=NEVER_ZERO)


def _limbs(states: Tensor, bound: float, limbs: int) -> Tensor:
    """Values as the sum of their limbs; beyond the bound they are cut off."""
    step = bound / MOST
    high = (states / step).round().clamp(-ZERO, MOST) * step
    if limbs == 1:
        return high
    low = step / LIMB
    return high + ((states - high) / low).round().clamp(-ZERO, MOST) * low
