"""Table engine: a fake model whose next token depends on the last one only, so probabilities are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from support.hash_engine import CHILD, END, FORK, MASKS, VOCAB, Cell, Language


@dataclass
class Table(Language):
    """A language whose state is the last token; its mask slots predict noisy average successors."""

    tokens: int = 10  # ids below this have probability, all others none
    spread: float = 1.5  # standard deviation of the logits
    doubt: float = 0.5  # standard deviation of the noise of mask slots

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        self.rows = random.normal(0, self.spread, (VOCAB, VOCAB)).astype(np.float32)
        self.rows[:, self.tokens :] = -np.inf
        self.rows[:, [*MASKS, CHILD, FORK]] = 3  # probable, but banned
        self.rows[:, END] = -np.inf
        self.following = np.exp(self.rows)
        self.following[:, self.tokens :] = 0
        self.following /= self.following.sum(axis=1, keepdims=True)
        self.drafts: dict[tuple[int, int], NDArray[np.float32]] = {}

    def state(self, cells: Sequence[Cell], near: Sequence[Cell], token: int, position: int) -> int:
        return token

    def logits(self, state: int) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self.rows[state]
        return row

    def draft(self, known: Sequence[Cell], depth: int) -> NDArray[np.float32]:
        """The token at this distance from the last one."""
        token = known[-1].token
        if (token, depth) not in self.drafts:
            with np.errstate(divide="ignore"):
                average = np.log(np.linalg.matrix_power(self.following, depth + 2)[token])
            doubt = np.random.default_rng((self.seed, token, depth)).normal(0, self.doubt, VOCAB)
            self.drafts[token, depth] = (average + doubt).astype(np.float32)
        return self.drafts[token, depth]
