"""Correction: candidates of mask slots that depend on the token before them, by a bundle's draft correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.draft_correction import CANDIDATES, CorrectionTables
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.selector import TokenSelector
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.engine import SelectedRows


@dataclass(frozen=True)
class CorrectedCandidates(Candidates):
    """The most probable tokens of a mask slot; `behind` corrects their probabilities and returns the best of them."""

    tables: CorrectionTables
    most: int  # number of tokens to return
    _known: dict[int, Candidates] = field(default_factory=dict, compare=False, repr=False)

    def behind(self, token: int) -> Candidates:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._behind(token) if self.tokens else self
        return found

    def _behind(self, token: int) -> Candidates:
        vectors = self.tables.after[list(self.tokens)].astype(np.float32)
        corrections = vectors @ self.tables.before[token].astype(np.float32)
        probabilities = np.array(self.probabilities)
        weights = probabilities * np.exp(corrections - corrections.max())
        if not (total := weights.sum()) > 0:
            return Candidates(self.tokens[: self.most], self.probabilities[: self.most])
        weights *= probabilities.sum() / total
        order = np.argsort(-weights, kind="stable")[: self.most]
        return Candidates(tuple([self.tokens[index] for index in order]), tuple(weights[order].tolist()))


@dataclass(frozen=True)
class Corrected:
    """A token selector that corrects the candidates of another one; the tokens that it selects are the same."""

    inner: TokenSelector
    tables: CorrectionTables

    @property
    def selects(self) -> bool:
        """Whether the inner selector takes `SelectedRows`."""
        return getattr(self.inner, "selects", False)

    def token(self, logits: NDArray[np.float32] | SelectedRows, thread: Thread, ahead: Sequence[int]) -> int:
        return self.inner.token(logits, thread, ahead)  # type: ignore[arg-type]

    def candidates(
        self, logits: NDArray[np.float32] | SelectedRows, thread: Thread, position: int, most: int
    ) -> tuple[Candidates, ...]:
        found = self.inner.candidates(logits, thread, position, max(most, CANDIDATES))  # type: ignore[arg-type]
        return tuple([CorrectedCandidates(each.tokens, each.probabilities, self.tables, most) for each in found])
