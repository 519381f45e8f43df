"""Head loss: cross entropy behind a frozen output embedding, a few rows at a time, so that no logits are stored.

Logits of a thousand rows and a vocabulary of 50,000 take 200 MB, and as much again for each step of the softmax and of the
backward pass. Here the gradient of each row is computed together with its loss, while its logits are in the caches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_ROWS = 128  # whose logits are held at once


class RowLosses(NamedTuple):
    """Losses of rows, and the best tokens of each as candidates of its draft."""

    losses: Tensor  # N: cross entropy
    correct: Tensor  # N: 1 if the most probable token is the target, else 0
    candidates: Tensor  # N x C: the most probable tokens, best first
    scores: Tensor  # N x C: their logits, without gradients


class _HeadLoss(torch.autograd.Function):
    """Losses of rows, with the gradient of each stored in place of its logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, most: int
    ) -> tuple[Tensor, ...]:
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        correct = torch.empty_like(losses)
        gradients = torch.empty_like(hidden)
        count = min(most, len(weight))
        scores = hidden.new_empty(len(hidden), count, dtype=torch.float32)
        candidates = torch.empty_like(scores, dtype=torch.int64)
        for first in range(0, len(hidden), _ROWS):
            rows = slice(first, first + _ROWS)
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            wanted = targets[rows, None]
            scores[rows], candidates[rows] = logits.topk(count)
            correct[rows] = (candidates[rows, :1] == wanted)[:, 0].float()
            probabilities = torch.log_softmax(logits, -1, dtype=torch.float32)
            losses[rows] = -probabilities.gather(1, wanted)[:, 0]
            probabilities.exp_().scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=torch.float32))
            gradients[rows] = probabilities.to(weight.dtype) @ weight
        ctx.save_for_backward(gradients)
        ctx.mark_non_differentiable(correct, candidates, scores)
        return losses, correct, candidates, scores

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradients,) = ctx.saved_tensors
        return outer[0][:, None].to(gradients.dtype) * gradients, None, None, None, None


def head_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, most: int) -> RowLosses:
    """The losses of rows of hidden states (N x H), with up to `most` candidates each."""
    with torch.autocast(hidden.device.type, enabled=False):
        found = _HeadLoss.apply(hidden.to(weight.dtype), weight, bias, targets, most)  # type: ignore[no-untyped-call]
    return RowLosses(*found)
