"""Draft correction: how the token before a mask slot's candidate raises or lowers its score.

The mask slots of a step predict their tokens independently: they do not know which token is chosen before theirs. The
correction of a candidate is a product of two vectors, one of the token before it and one of its own. Both are low-rank
projections of the model's token embeddings, so that tokens which were rare in the training profit from similar ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from spaceport.graphs.contract.draft_methods import CORRECTION_FILE, CorrectionTables, write_tables
from spaceport.graphs.contract.json_fields import JsonField
from spaceport.graphs.mechanism import Mechanism, MechanismError, Rotation, wrong_shapes
from spaceport.graphs.streamed_weights import values_of


@dataclass(frozen=True, eq=False)
class Factors(Mechanism):
    """Projections of token embeddings, each H x rank: of the token before a candidate, and of the candidate."""

    name: ClassVar[str] = "draft_correction"
    refines: ClassVar[bool] = True

    before: Tensor
    after: Tensor

    @property
    def rank(self) -> int:
        return self.before.shape[1]

    @property
    def entry(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def state(self) -> Mapping[str, Tensor]:
        return {"before": self.before.half(), "after": self.after.half()}

    @classmethod
    def read(cls, entry: JsonField, tensors: Mapping[str, Tensor]) -> Factors:
        rank = entry.exactly("rank")["rank"].whole(1)
        shapes = {tuple(tensor.shape[1:]) for tensor in tensors.values()} | {(rank,)}
        if tensors.keys() != {"before", "after"} or len(shapes) > 1 or len(tensors["before"]) != len(tensors["after"]):
            raise wrong_shapes(tensors, f"before and after, H x {rank}")
        return cls(tensors["before"].float(), tensors["after"].float())

    def apply(self, model: PreTrainedModel, mask_ids: Sequence[int] = ()) -> None:
        """Verify that the factors are those of a model; its graph does not change."""
        size, expected = self.before.shape[0], cast(nn.Embedding, model.get_input_embeddings()).weight.shape[1]
        if size != expected:
            raise MechanismError(f"is for embeddings of size {size}: expected {expected}, that of the model")

    def write_files(
        self, bundle: Path, model: PreTrainedModel, vocab_size: int, rotation: Rotation | None = None
    ) -> None:
        """Write the tables of all tokens; tokens without an embedding have none."""
        embeddings = cast(nn.Embedding, model.get_input_embeddings()).weight
        missing = max(0, vocab_size - embeddings.shape[0])
        before, after = (
            nn.functional.pad(table[:vocab_size], (0, 0, 0, missing)).half().numpy()
            for table in self.rotated(rotation).tables(values_of(embeddings))
        )
        with (bundle / CORRECTION_FILE).open("wb") as file:
            write_tables(file, CorrectionTables(before, after))

    def rotated(self, rotation: Rotation | None) -> Factors:
        """The factors for embeddings that are rotated; unchanged without a rotation."""
        if rotation is None:
            return self
        return Factors(rotation.times(self.before.T).T.float(), rotation.times(self.after.T).T.float())

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
        entropy = cross_entropy(corrected, equal.to(torch.uint8).argmax(-1), reduction="none")
        correct = equal.gather(1, corrected.argmax(-1, keepdim=True))[:, 0]
        return torch.where(equal.any(-1), entropy, torch.zeros_like(entropy)), correct.to(entropy.dtype)

    def factors(self) -> Factors:
        """The trained factors for unscaled embeddings."""
        return Factors(*((factor.detach() * self.scale).float().cpu() for factor in (self.before, self.after)))

    def _scaled(self, embeddings: Tensor, tokens: Tensor) -> Tensor:
        return torch.nn.functional.embedding(tokens, embeddings.detach()).float() * self.scale
