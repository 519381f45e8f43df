"""Draft correction: how the token before a mask slot's candidate raises or lowers its score.

The mask slots of a step predict their tokens independently: they do not know which token is chosen before theirs. The
correction of a candidate is a product of two vectors, one of the token before it and one of its own. Both are low-rank
projections of the model's token embeddings, so that tokens which were rare in the training profit from similar ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from spaceport.graphs.rotation import Orthogonal


class Factors(NamedTuple):
    """Projections of token embeddings, each H x rank: of the token before a candidate, and of the candidate."""

    before: Tensor
    after: Tensor

    @property
    def rank(self) -> int:
        return self.before.shape[1]

    def rotated(self, rotation: Orthogonal | None) -> Factors:
        """The factors for embeddings that are rotated; unchanged without a rotation."""
        return self if rotation is None else Factors(*(rotation.times(factor.T).T.float() for factor in self))

    def tables(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors of all tokens, each V x rank, for a table of token embeddings (V x H)."""
        table = embeddings.detach().float()
        return table @ self.before, table @ self.after


class DraftCorrection(nn.Module):
    """The factors as trainable parameters, for embeddings scaled to a mean square of 1."""

    def __init__(self, embeddings: Tensor, rank: int, factors: Factors | None = None) -> None:
        super().__init__()
        hidden = embeddings.shape[1]
        self.scale = float(embeddings.detach().float().pow(2).mean().rsqrt())
        if factors is None:
            factors = Factors(torch.randn(hidden, rank) * self.scale / hidden**0.5, torch.zeros(hidden, rank))
        self.before = nn.Parameter((factors.before.float() / self.scale).to(embeddings.device))
        self.after = nn.Parameter((factors.after.float() / self.scale).to(embeddings.device))

    def forward(self, embeddings: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """The corrections (N x C) of candidates (N x C token ids) behind the tokens `before` (N)."""
        left = self._scaled(embeddings, before) @ self.before
        right = self._scaled(embeddings, candidates) @ self.after
        return torch.einsum("nr,ncr->nc", left, right)

    def losses(
        self, embeddings: Tensor, before: Tensor, candidates: Tensor, scores: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross entropy of each row over its candidates, and whether the best of them is the target.

        A row whose target is not among its candidates has no loss: no correction can choose it.
        """
        corrected = scores.float() + self(embeddings, before, candidates)
        equal = candidates == targets[:, None]
        each = cross_entropy(corrected, equal.to(torch.uint8).argmax(-1), reduction="none")
        correct = equal.gather(1, corrected.argmax(-1, keepdim=True))[:, 0]
        return torch.where(equal.any(-1), each, torch.zeros_like(each)), correct.to(each.dtype)

    def factors(self) -> Factors:
        """The trained factors for unscaled embeddings."""
        return Factors(*((factor.detach() * self.scale).float().cpu() for factor in (self.before, self.after)))

    def _scaled(self, embeddings: Tensor, tokens: Tensor) -> Tensor:
        return torch.nn.functional.embedding(tokens, embeddings.detach()).float() * self.scale
