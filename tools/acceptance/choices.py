"""Choices: the greedy choice at each place of one line, with the rules of forks."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.manifest import TokenIds
from spaceport.runtime.sampling import greedy


class Choices:
    """The likeliest token that may be written; right behind [Fork] that is never another.

    What stands before a place is what was told or chosen for it last, so the places of a line are asked for in order.
    """

    def __init__(self, tokens: TokenIds, banned: Collection[int] = ()) -> None:
        never = {*tokens.unwritable, *banned}
        self._fork = tokens.fork
        self._anywhere = greedy(never)
        self._behind_fork = greedy(never if tokens.fork is None else {*never, tokens.fork})
        self._at: dict[int, int] = {}

    def __getitem__(self, place: int) -> int:
        """What was chosen for a place."""
        return self._at[place]

    def tell(self, token: int, place: int) -> None:
        """This token stands at this place."""
        self._at[place] = token

    def __call__(self, logits: NDArray[np.float32], path: tuple[int, ...], place: int) -> int:
        behind_fork = self._fork is not None and self._at.get(place - 1) == self._fork
        choose = self._behind_fork if behind_fork else self._anywhere
        self._at[place] = choose(logits, path, place)
        return self._at[place]
