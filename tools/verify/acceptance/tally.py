"""Tally: per-slot accuracy, tokens per step and accepted prompt-lookup tokens, counted along answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.draft_methods import LOOKUP_KINDS, lookup_kind
from spaceport.runtime.decode.sources import Lookup
from spaceport.runtime.decoding import DEFAULT_LOOKUP


def correct_predictions(predicted: NDArray[np.int64], answer: Sequence[int]) -> NDArray[np.bool_]:
    """Which predictions are correct: indices of the answer x slots; slot i at index n predicts token n + i."""
    correct = np.zeros(predicted.shape, np.bool_)
    for slot in range(min(predicted.shape[1], len(answer))):
        count = len(answer) - slot
        correct[:count, slot] = predicted[:count, slot] == np.array(answer[slot:], np.int64)
    return correct


def chain_starts(correct: NDArray[np.bool_], mask_slots: int) -> list[int]:
    """Index of the last known token in each step that generates an answer with this number of mask slots, after the first.

    The first step yields one token. Each later step verifies the draft tokens that the mask slots predicted one step
    earlier; it yields the leading correct ones and one more token.
    """
    accepted = _accepted(correct, mask_slots).sum(axis=1)
    starts, last = [], 0  # last: index of the last generated token
    while last < len(correct) - 1:
        starts.append(last)
        last += int(accepted[last]) + 1
    return starts


def count_steps(correct: NDArray[np.bool_], mask_slots: int) -> int:
    """Steps that the runtime takes to generate an answer with this number of mask slots."""
    return 1 + len(chain_starts(correct, mask_slots))


def _accepted(correct: NDArray[np.bool_], mask_slots: int) -> NDArray[np.int64]:
    """Whether the draft tokens behind each token are accepted: indices of the answer x slots, 1 = accepted."""
    return np.cumprod(correct[:, 1 : 1 + mask_slots], axis=1, dtype=np.int64)


@dataclass
class Tally:
    """Counts over the answers of one kind."""

    mask_slots: int
    segments: int = 0
    tokens: int = 0  # without end tokens, as in a request's statistics
    predictions: list[int] = field(default_factory=list)  # by slot; slot 0 predicts the next token
    correct: list[int] = field(default_factory=list)  # by slot
    steps: list[int] = field(default_factory=list)  # with 0, 1, ... mask slots
    drafted: list[int] = field(
        default_factory=list
    )  # with all mask slots: draft tokens by depth that the answer reaches
    accepted: list[int] = field(default_factory=list)  # of these, by depth

    def __post_init__(self) -> None:
        for counts in (self.predictions, self.correct, self.steps):
            counts.extend([0] * (1 + self.mask_slots))
        for by_depth in (self.drafted, self.accepted):
            by_depth.extend([0] * self.mask_slots)

    def add(self, predicted: NDArray[np.int64], answer: Sequence[int], ended: bool) -> None:
        """Count one segment; `ended` if its last token is an end token."""
        if not answer:
            return
        correct = correct_predictions(predicted, answer)
        self.segments += 1
        self.tokens += len(answer) - ended
        for slot in range(1 + self.mask_slots):
            self.predictions[slot] += max(0, len(answer) - slot)
            self.correct[slot] += int(correct[:, slot].sum())
            self.steps[slot] += count_steps(correct, slot)
        accepted = _accepted(correct, self.mask_slots)
        for last in chain_starts(correct, self.mask_slots):
            for depth in range(min(self.mask_slots, len(answer) - 1 - last)):
                self.drafted[depth] += 1
                self.accepted[depth] += int(accepted[last, depth])

    @property
    def acceptance(self) -> list[float | None]:
        """Share of accepted draft tokens by depth in chains of all mask slots."""
        return [good / count if count else None for good, count in zip(self.accepted, self.drafted, strict=True)]

    @property
    def accuracy(self) -> list[float | None]:
        """Share of correct predictions by slot; None for a slot without predictions."""
        return [good / count if count else None for good, count in zip(self.correct, self.predictions, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """The counts, accuracy and tokens per step as JSON data."""
        return {
            **asdict(self),
            "accuracy": self.accuracy,
            "tokens_per_step": self.tokens_per_step,
            "acceptance": self.acceptance,
        }

    @property
    def tokens_per_step(self) -> list[float | None]:
        """Tokens per step with 0, 1, ... mask slots."""
        return [self.tokens / steps if steps else None for steps in self.steps]


@dataclass
class LookupTally:
    """Counts of prompt-lookup tokens along answers, by kind of match."""

    tokens: list[int] = field(default_factory=lambda: [0] * LOOKUP_KINDS)  # behind accepted ones
    accepted: list[int] = field(default_factory=lambda: [0] * LOOKUP_KINDS)  # of these

    def add(self, prefix: Sequence[int], answer: Sequence[int], most: int = DEFAULT_LOOKUP) -> None:
        """Count the steps that generate an answer with up to `most` tokens of prompt lookup and no other drafts."""
        lookup, text, copied = Lookup(), list(prefix), 0
        position = 0
        while position < len(answer):
            found, equal = lookup.following(text, most)
            written = answer[position : position + len(found) + 1]
            right = 0
            for depth, (token, expected) in enumerate(zip(found, written, strict=False)):
                kind = lookup_kind(equal + depth, copied + depth)
                self.tokens[kind] += 1
                if token != expected:
                    break
                self.accepted[kind] += 1
                right += 1
            whole = right == min(len(found), len(written))
            copied = copied + right if whole and right else 0
            text += written[: right + 1]
            position += right + 1

    @property
    def acceptance(self) -> list[float | None]:
        """Share of accepted tokens by kind; None for a kind without tokens."""
        return [good / count if count else None for good, count in zip(self.accepted, self.tokens, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """The counts and shares as JSON data."""
        return {**asdict(self), "acceptance": self.acceptance}


@dataclass
class ForkTally:
    """Predicted against expected [Fork] tokens, over the root threads of reference answers."""

    positions: int = 0
    expected: int = 0  # [Fork] tokens in the reference answers
    predicted: int = 0
    correct: int = 0

    def add(self, predictions: NDArray[np.int64], answer: Sequence[int], fork: int) -> None:
        """Count one root thread, with the next-token prediction at each of its tokens."""
        predicted, expected = predictions == fork, np.array(answer, np.int64) == fork
        self.positions += len(answer)
        self.expected += int(expected.sum())
        self.predicted += int(predicted.sum())
        self.correct += int((predicted & expected).sum())

    def as_dict(self) -> dict[str, Any]:
        """The counts, precision and recall as JSON data."""
        return {**asdict(self), "precision": self.precision, "recall": self.recall}

    @property
    def precision(self) -> float | None:
        return self.correct / self.predicted if self.predicted else None

    @property
    def recall(self) -> float | None:
        return self.correct / self.expected if self.expected else None
