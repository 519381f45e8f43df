"""Thread: one line of text under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ending = Literal["end", "stop", "length"]


@dataclass
class Thread:
    """A line of text: everything that it holds from the first token of the prompt on, and what it may see of it."""

    path: tuple[int, ...]  # which fork of which fork this is; the first line of a request is ()
    tokens: list[int]  # prompt and text; the place of a token in it is its position
    start: int  # place of the first token that the thread itself wrote
    sees: NDArray[np.bool_]  # slots; True = holds what the thread sees
    fed: int = 0  # how many of the tokens are in the KV buffer
    candidates: tuple[int, ...] = ()  # what the mask slots said comes next
    ending: Ending | None = None
    drafted: list[bool] = field(default_factory=list)  # for each own token: was it an accepted candidate

    @property
    def written(self) -> list[int]:
        """The tokens that the thread itself wrote."""
        return self.tokens[self.start :]

    @property
    def held(self) -> NDArray[np.int64]:
        """The slots that the thread holds."""
        return np.flatnonzero(self.sees)

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Follow what the thread sees to other slots."""
        moved = self.sees[sources].copy()
        self.sees[sources] = False
        self.sees[targets] = moved
