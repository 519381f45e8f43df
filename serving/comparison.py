"""A completion compared with plain decoding, token by token, while plain decoding generates it again."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.sequence import NotANumber, TokenSelector, TokenSequence
from spaceport.runtime.decode.sequence_group import VerifiedStep
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.text.transcript import Path, ThreadText

Outcome = Literal["equal", "near_tie", "fault"]

_MOST_SHIFT = 1024.0  # logits; a token that even this does not select is banned or outside of the grammar
_ROUNDS = 32  # of bisection


@dataclass(frozen=True)
class CompletionDifference:
    """The first position of a thread at which plain decoding selects another token.

    - `path`: Path of the thread.
    - `position`: Position in the thread, prompt included.
    - `plain`: Token that plain decoding selects; None: it has ended.
    - `found`: Token of the completion; None: it has ended.
    - `shift`: By how much the logits of the two tokens have to move towards each other until plain decoding selects the
      completion's token; inf: it never does.
    - `allowed`: The largest shift that rounding explains.
    - `reason`: What is wrong, if no shift can explain it.
    """

    path: Path
    position: int
    plain: int | None = None
    found: int | None = None
    shift: float = math.inf
    allowed: float = 0.0
    reason: str = ""

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.shift <= self.allowed


def plain_decoding(decoding: Decoding, completion: Completion) -> Decoding:
    """The options that generate a completion again: without drafts and prefix cache, one thread at a time."""
    return replace(
        decoding,
        mask_slots=0,
        lookup=0,
        draft_rows=None,
        draft_siblings=None,
        max_threads=1,
        prefix_cache=False,
        timeout=None,
        logprobs=None,
        trace=False,
        sampling=replace(decoding.sampling, seed=completion.seed),
    )


class CompletionComparison:
    """Observer of plain decoding that finds the first difference of each thread of a completion."""

    def __init__(self, completion: Completion, tolerance: float, stops: bool = False) -> None:
        """Compare with a completion.

        - `tolerance`: The largest change of a logit that rounding explains, relative to the largest logit.
        - `stops`: Whether a stop string may have cut off the last tokens of a thread.
        """
        self._completion = completion
        self._threads = {thread.path: thread for thread in completion.threads}
        self._tolerance = tolerance
        self._stops = stops
        self.differences: dict[Path, CompletionDifference] = {}

    def on_step(self, verified: VerifiedStep) -> None:
        """Compare the token of each thread with the one that it has in the completion."""
        for part, verdict, logits in zip(verified.plan.parts, verified.verdicts, verified.logits, strict=True):
            thread = part.thread
            completed = self._threads.get(thread.path)
            if not verdict.tokens or completed is None or self._differs(thread.path):
                continue
            group, token = verified.request, verdict.tokens[0]
            index, ends = len(thread.tokens) - thread.start, group.end | group.stop
            if index < len(completed.tokens):
                completed_token, expected = completed.tokens[index], {completed.tokens[index]}
            elif self._is_cut(completed):
                continue
            else:
                completed_token, expected = None, set(ends)
            if token not in expected:
                line = logits[part.layout.known - 1 - int(part.rows_wanted[0])]
                shift = shift_of(group.selector, line, thread, token, expected)
                shown = None if token in ends else token
                allowed = self._tolerance * max(1.0, float(np.abs(line[np.isfinite(line)]).max(initial=0.0)))
                position = len(thread.tokens)
                self.differences[thread.path] = CompletionDifference(
                    thread.path, position, shown, completed_token, shift, allowed
                )

    def outcome(self, plain: Completion) -> Outcome:
        """The result, once plain decoding has ended with this completion."""
        if not self.differences and (reason := self._other_difference(plain)):
            self.differences[()] = CompletionDifference((), len(plain.prompt_tokens), reason=reason)
        if not self.differences:
            return "equal"
        return "near_tie" if all(difference.near_tie for difference in self.differences.values()) else "fault"

    def _differs(self, path: Path) -> bool:
        """Whether a thread or one that it was forked from differs already, so that the rest cannot be compared."""
        return any(path[:length] in self.differences for length in range(len(path) + 1))

    def _is_cut(self, thread: ThreadText) -> bool:
        """Whether the thread has lost tokens behind its last one: the length says nothing."""
        return thread.ending == "total" or (thread.ending == "stop" and self._stops)

    def _other_difference(self, plain: Completion) -> str:
        """What differs although each token that both have is the same; empty: nothing."""
        if any(thread.ending == "total" for thread in (*plain.threads, *self._completion.threads)):
            return ""  # which threads get the last slots depends on how fast each one is
        plain_threads = {thread.path: thread for thread in plain.threads}
        if plain_threads.keys() != self._threads.keys():
            return f"plain decoding has {len(plain_threads)} threads, the completion has {len(self._threads)}"
        for path, thread in plain_threads.items():
            completed = self._threads[path]
            if len(thread.tokens) != len(completed.tokens):
                return f"a thread has {len(completed.tokens)} tokens, in plain decoding {len(thread.tokens)}"
            if (thread.fork, thread.ending, thread.tokens) != (completed.fork, completed.ending, completed.tokens):
                return f"a thread ended with {completed.ending}, in plain decoding with {thread.ending}"
        return "" if plain.text == self._completion.text else "the tokens are equal, their text differs"


def shift_of(
    selector: TokenSelector, logits: NDArray[np.float32], thread: TokenSequence, token: int, others: Collection[int]
) -> float:
    """By how much two logits have to move towards each other until one of `others` is selected instead of `token`.

    It includes all that selects a token: noise, filters, penalties and grammars.
    """
    return min((_shift(selector, logits, thread, token, other) for other in others), default=math.inf)


def _shift(
    selector: TokenSelector, logits: NDArray[np.float32], thread: TokenSequence, token: int, other: int
) -> float:
    def is_selected(shift: float) -> bool:
        moved = logits.copy()
        moved[token] -= shift
        moved[other] += shift
        return _selected(selector, moved, thread) == other

    low, high = 0.0, _MOST_SHIFT
    if not is_selected(high):
        return math.inf
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_selected(middle) else (middle, high)
    return high


def _selected(selector: TokenSelector, logits: NDArray[np.float32], thread: TokenSequence) -> int | None:
    try:
        return selector.token(logits, thread, ())
    except (NotANumber, OptionFault):  # of a grammar that allows no token
        return None
