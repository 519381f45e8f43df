"""Thread: one sequence of tokens of a request; forks start child threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.decode.draft import Candidates

# Why a thread ended: its end token, a stop string, max_tokens or max_seq_len; or why the whole request ended:
# max_total_tokens, its timeout, a cancelled stream.
Ending = Literal["end", "stop", "length", "total", "deadline", "cancelled"]


@dataclass
class Thread:
    """The tokens of one thread, from the first prompt token on, and the KV slots that it sees."""

    path: tuple[int, ...]  # index among its parent's children, for each level; () is the root thread
    tokens: list[int]  # prompt and generated tokens; the index of a token is its position
    start: int  # position of the first token that the thread itself generated
    sees: NDArray[np.bool_]  # slots; True = visible to the thread
    fed: int = 0  # number of tokens in the KV cache
    fork: int | None = None  # position of the [Fork] that started it; None: root thread
    forks: int = 0  # number of child threads
    candidates: tuple[Candidates, ...] = ()  # what the mask slots predicted for the next positions
    ending: Ending | None = None
    drafted: list[bool] = field(default_factory=list)  # for each generated token: whether it was an accepted candidate
    draft_state: dict[str, Any] = field(default_factory=dict)  # what draft sources store of it; a child gets copies

    @property
    def generated(self) -> list[int]:
        """The tokens that the thread itself generated."""
        return self.tokens[self.start :]

    @property
    def held(self) -> NDArray[np.int64]:
        """The KV slots that the thread holds."""
        return np.flatnonzero(self.sees)

    @property
    def waits_for_fork(self) -> bool:
        """Whether the [Fork] that started it is not in the KV cache yet."""
        return self.fork is not None and self.fed <= self.fork

    def child(self, fork: int, token: int, unseen: NDArray[np.int64]) -> Thread:
        """A child thread that continues with `token` after the [Fork] at a position, and does not see these slots."""
        sees = self.sees.copy()
        sees[unseen] = False
        path = (*self.path, self.forks)
        self.forks += 1
        state = {source: state.copy() for source, state in self.draft_state.items()}
        tokens = [*self.tokens[: fork + 1], token]
        return Thread(path, tokens, fork + 2, sees, min(self.fed, fork + 1), fork, draft_state=state)

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Update the visible slots after the engine has moved some."""
        moved = self.sees[sources].copy()
        self.sees[sources] = False
        self.sees[targets] = moved


def new_thread(prompt: Sequence[int], capacity: int) -> Thread:
    """The root thread of a request."""
    return Thread((), list(prompt), len(prompt), np.zeros(capacity, np.bool_))
