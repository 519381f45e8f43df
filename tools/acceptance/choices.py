"""Choices: the greedy choice at each place of one line, with the rules of forks."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.manifest import TokenIds
from spaceport.runtime.sampling import greedy


class Choices:
    """The likeliest token that may be written; [Fork] is never one right behind [Fork].

    What stands before a place is known from the choices before it, so the places of a line are asked for in order.
    """

    def __init__(self, tokens: TokenIds, last: int, place: int, banned: Collection[int] = ()) -> None:
        """For what follows the token `last`, which stands right before `place`."""
        never = {*tokens.unwritable, *banned}
        self._fork = tokens.fork
        self._anywhere = greedy(never)
        self._behind_fork = greedy(never if tokens.fork is None else {*never, tokens.fork})
        self.made = {place - 1: last}

    def __call__(self, logits: NDArray[np.float32], path: tuple[int, ...], place: int) -> int:
        behind_fork = self._fork is not None and self.made.get(place - 1) == self._fork
        choose = self._behind_fork if behind_fork else self._anywhere
        self.made[place] = choose(logits, path, place)
        return self.made[place]
