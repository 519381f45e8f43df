"""Thread: one line of text under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.lookup import Lookup

# What ended a thread: its end token, a stop string, its own limit; or, the whole request's: the limit on all its
# threads together, a deadline, somebody who does not want it any more.
Ending = Literal["end", "stop", "length", "total", "deadline", "cancelled"]


@dataclass
class Thread:
    """A line of text: everything that it holds from the first token of the prompt on, and what it may see of it."""

    path: tuple[int, ...]  # which fork of which fork this is; the first line of a request, its spine, is ()
    tokens: list[int]  # prompt and text; the place of a token in it is its position
    start: int  # place of the first token that the thread itself wrote
    sees: NDArray[np.bool_]  # slots; True = holds what the thread sees
    fed: int = 0  # how many of the tokens are in the KV buffer
    fork: int | None = None  # place of the [Fork] that it hangs from; nothing: it is a spine
    forks: int = 0  # how many threads hang from it
    candidates: tuple[Candidates, ...] = ()  # what the mask slots said comes next
    ending: Ending | None = None
    drafted: list[bool] = field(default_factory=list)  # for each own token: was it an accepted candidate
    lookup: Lookup | None = None  # where the words of its text stood before

    @property
    def generated(self) -> list[int]:
        """The tokens that the thread itself wrote."""
        return self.tokens[self.start :]

    @property
    def held(self) -> NDArray[np.int64]:
        """The slots that the thread holds."""
        return np.flatnonzero(self.sees)

    @property
    def waits_for_fork(self) -> bool:
        """Whether the [Fork] that it hangs from is not in the KV buffer yet."""
        return self.fork is not None and self.fed <= self.fork

    def child(self, fork: int, token: int, unseen: NDArray[np.int64]) -> Thread:
        """A thread that goes on with `token` behind the [Fork] at a place, and does not see these of its slots."""
        sees = self.sees.copy()
        sees[unseen] = False
        path = (*self.path, self.forks)
        self.forks += 1
        lookup = None if self.lookup is None else self.lookup.copy()
        tokens = [*self.tokens[: fork + 1], token]
        return Thread(path, tokens, fork + 2, sees, min(self.fed, fork + 1), fork, lookup=lookup)

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Follow what the thread sees to other slots."""
        moved = self.sees[sources].copy()
        self.sees[sources] = False
        self.sees[targets] = moved


def new_thread(prompt: Sequence[int], capacity: int, lookup: bool = False) -> Thread:
    """The first thread of a request, whose text follows a prompt."""
    return Thread((), list(prompt), len(prompt), np.zeros(capacity, np.bool_), lookup=Lookup() if lookup else None)
