"""Head loss: cross entropy behind a frozen output embedding, a few rows at a time, so that no logits are stored.

Logits of a thousand rows and a vocabulary of 50,000 take 200 MB, and as much again for each step of the softmax and of the
backward pass. Here the gradient of each row is computed together with its loss, while its logits are in the caches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROWS = 128  # whose logits are held at once


class _HeadLoss(torch.autograd.Function):
    """Losses of rows, with the gradient of each stored in place of its logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        correct = torch.empty_like(losses)
        gradients = torch.empty_like(hidden)
        for first in range(0, len(hidden), _ROWS):
            rows = slice(first, first + _ROWS)
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            wanted = targets[rows, None]
            correct[rows] = (logits.argmax(-1, keepdim=True) == wanted)[:, 0].float()
            probabilities = torch.log_softmax(logits, -1, dtype=torch.float32)
            losses[rows] = -probabilities.gather(1, wanted)[:, 0]
            probabilities.exp_().scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=torch.float32))
            gradients[rows] = probabilities.to(weight.dtype) @ weight
        ctx.save_for_backward(gradients)
        ctx.mark_non_differentiable(correct)
        return losses, correct

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:
        (gradients,) = ctx.saved_tensors
        return outer[0][:, None].to(gradients.dtype) * gradients, None, None, None


def head_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of each row of hidden states (N x H), and whether its most probable token is the target."""
    with torch.autocast(hidden.device.type, enabled=False):
        losses, correct = _HeadLoss.apply(hidden.to(weight.dtype), weight, bias, targets)  # type: ignore[no-untyped-call]
    return losses, correct
