"""Sampling: which token a row's logits mean."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class NotANumber(RuntimeError):
    """An engine gave logits that are not numbers."""


class Choose(Protocol):
    """Says which token logits mean at one place of one thread: the same place, thread and logits, the same token."""

    def __call__(self, logits: NDArray[np.float32], path: tuple[int, ...], place: int) -> int: ...


def greedy(banned: Collection[int]) -> Choose:
    """The likeliest token that is not banned; of equals the lowest id."""
    never = frozenset(banned)
    columns = np.array(sorted(never), np.int64)

    def choose(logits: NDArray[np.float32], path: tuple[int, ...], place: int) -> int:
        token = int(logits.argmax())
        if np.isnan(logits[token]):
            raise NotANumber(
                f"the logits for the token at place {place} hold NaN: `spaceport check` on the bundle tells whether the "
                "export or the engine is at fault; a float16 model that overflows needs --dtype float32 at its export"
            )
        if token in never:
            allowed = logits.copy()
            allowed[columns] = -np.inf
            token = int(allowed.argmax())
        return token

    return choose
