"""Low rank: a frozen linear layer plus a trained low-rank product, as one function with few passes over the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _LowRankLinear(torch.autograd.Function):
    """x W^T + bias + scale (x A^T) B^T, with gradients for x, A and B. Matmuls run in the type of W."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        rows = states.to(weight.dtype).flatten(0, -2)
        down, up = a.to(weight.dtype), (b * scale).to(weight.dtype)
        low = rows @ down.T
        output = torch.nn.functional.linear(rows, weight, bias).addmm_(low, up.T)
        ctx.save_for_backward(rows, low, down, up, weight)
        ctx.scale, ctx.types, ctx.shape = scale, (states.dtype, a.dtype, b.dtype), states.shape
        return output.view(*states.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, Tensor, Tensor, None]:
        rows, low, down, up, weight = ctx.saved_tensors
        gradient = outer[0].to(weight.dtype).flatten(0, -2)
        low_gradient = gradient @ up
        states = (gradient @ weight).addmm_(low_gradient, down).view(ctx.shape)
        types = ctx.types
        a = (low_gradient.T @ rows).to(types[1])
        b = (gradient.T @ low).to(types[2]) * ctx.scale
        return states.to(types[0]), None, None, a, b, None


def low_rank_linear(states: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The output of a frozen linear layer plus scale times the low-rank product of A (r x in) and B (out x r)."""
    with torch.autocast(states.device.type, enabled=False):
        return _LowRankLinear.apply(states, weight, bias, a, b, scale)  # type: ignore[no-any-return, no-untyped-call]
