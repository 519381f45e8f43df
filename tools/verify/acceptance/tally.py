"""Tally: from predictions along lines to the accuracy of each slot and the tokens that a step writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


def hits(found: NDArray[np.int64], answer: Sequence[int]) -> NDArray[np.bool_]:
    """Where predictions are right, the answer's places x slots; slot i at place s is about place s + i."""
    right = np.zeros(found.shape, np.bool_)
    for slot in range(min(found.shape[1], len(answer))):
        about = len(answer) - slot
        right[:about, slot] = found[:about, slot] == np.array(answer[slot:], np.int64)
    return right


def count_steps(right: NDArray[np.bool_], mask_slots: int) -> int:
    """Steps that the runtime would take to write an answer with so many mask slots.

    The first step writes one token. Each after it verifies the candidates of the group that began at the place before,
    and writes those that are right, and one token more.
    """
    drafts = right[:, 1 : 1 + mask_slots]
    accepted = np.cumprod(drafts, axis=1, dtype=np.int64).sum(axis=1)
    steps, last = 1, 0  # the place of the last token that is written
    while last < len(right) - 1:
        last += int(accepted[last]) + 1
        steps += 1
    return steps


@dataclass
class Tally:
    """What was counted along lines of one kind."""

    mask_slots: int
    lines: int = 0
    tokens: int = 0  # written ones: the end token is not among them, as in a request's statistics
    asked: list[int] = field(default_factory=list)  # predictions of each slot from 0
    right: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # for 0, 1, ... mask slots

    def __post_init__(self) -> None:
        for counts in (self.asked, self.right, self.steps):
            counts.extend([0] * (1 + self.mask_slots))

    def add(self, found: NDArray[np.int64], answer: Sequence[int], ended: bool) -> None:
        """Count a line; `ended` says that its last token is an end token."""
        if not answer:
            return
        right = hits(found, answer)
        self.lines += 1
        self.tokens += len(answer) - ended
        for slot in range(1 + self.mask_slots):
            self.asked[slot] += max(0, len(answer) - slot)
            self.right[slot] += int(right[:, slot].sum())
            self.steps[slot] += count_steps(right, slot)

    @property
    def accuracy(self) -> list[float | None]:
        """Share of right predictions of each slot from 0; nothing where there were none."""
        return [got / of if of else None for got, of in zip(self.right, self.asked, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """The counts and what follows from them."""
        return {**asdict(self), "accuracy": self.accuracy, "tokens_per_step": self.tokens_per_step}

    @property
    def tokens_per_step(self) -> list[float | None]:
        """Tokens that a step writes with 0, 1, ... mask slots."""
        return [self.tokens / steps if steps else None for steps in self.steps]


@dataclass
class Forks:
    """[Fork] predicted against [Fork] in the tree, over the places of spines."""

    places: int = 0
    written: int = 0  # in the trees
    predicted: int = 0
    right: int = 0

    def add(self, predictions: NDArray[np.int64], answer: Sequence[int], fork: int) -> None:
        """Count a spine, with what is predicted for each of its places."""
        told, there = predictions == fork, np.array(answer, np.int64) == fork
        self.places += len(answer)
        self.written += int(there.sum())
        self.predicted += int(told.sum())
        self.right += int((told & there).sum())

    def as_dict(self) -> dict[str, Any]:
        """The counts and what follows from them."""
        return {**asdict(self), "precision": self.precision, "recall": self.recall}

    @property
    def precision(self) -> float | None:
        return self.right / self.predicted if self.predicted else None

    @property
    def recall(self) -> float | None:
        return self.right / self.written if self.written else None
