"""Completions compared token by token, and with what plain decoding selects at each position."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.sequence import Ending, NotANumber, TokenSelector, TokenSequence
from spaceport.runtime.decode.sequence_group import RequestStep
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.text.transcript import Path

_BOTH_TOKENS = 2  # rounding may lower one token's logit and raise the other's
_MOST_SHIFT = 1024.0  # logits; a token that even this does not select is banned or outside of the grammar
_ROUNDS = 32  # of bisection


@dataclass(frozen=True)
class ThreadTokens:
    """The tokens of one thread, prompt included."""

    path: Path
    tokens: tuple[int, ...]
    start: int  # position of the first token that the thread generated
    ending: Ending = "length"

    @property
    def ended(self) -> bool:
        """Whether an end token followed."""
        return self.ending == "end"

    @property
    def cut(self) -> bool:
        """Whether the KV slots of all threads together ran out: the length says nothing."""
        return self.ending == "total"

    @property
    def generated(self) -> int:
        """Number of tokens that the thread generated, end token included."""
        return len(self.tokens) - self.start + self.ended


@dataclass(frozen=True)
class TokenDifference:
    """A position at which a thread of a completion differs from plain decoding, or from another expected completion."""

    path: Path
    position: int  # in the thread, prompt included
    start: int  # position of the first token that the thread generated
    expected: int | None  # token id; None: the expected thread ended before, or there is none
    found: int | None  # token id; None: the thread ended before, or there is none
    margin: float = math.inf  # by how much plain decoding prefers `expected`, in logits; inf: unknown or banned
    allowed: float = 0.0  # largest margin that rounding explains
    reason: str = ""  # what is wrong, if it is not the token

    @property
    def token(self) -> int:
        """Number of the token, counted from 1 after the prompt or [Child]."""
        return self.position - self.start + 1

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference; False for a margin of NaN."""
        return not self.reason and self.margin <= self.allowed


def thread_tokens_of(completion: Completion, child: int | None) -> dict[Path, ThreadTokens]:
    """The threads of a completion, parents before their children; `child` is the id of [Child]."""
    threads: dict[Path, ThreadTokens] = {}
    for thread in completion.threads:
        before = completion.prompt_tokens
        if thread.fork is not None:
            assert child is not None
            parent = threads[thread.path[:-1]]
            before = (*parent.tokens[: parent.start + thread.fork + 1], child)
        threads[thread.path] = ThreadTokens(thread.path, (*before, *thread.tokens), len(before), thread.ending)
    return threads


def first_difference(thread: ThreadTokens, other: ThreadTokens) -> int | None:
    """The first position at which two threads with the same prefix differ; None if they are equal."""
    shorter = min(len(thread.tokens), len(other.tokens))
    for position in range(thread.start, shorter):
        if thread.tokens[position] != other.tokens[position]:
            return position
    differ = (len(thread.tokens), thread.ending) != (len(other.tokens), other.ending)
    return shorter if differ else None


def token_differences(
    found: Mapping[Path, ThreadTokens], expected: Mapping[Path, ThreadTokens]
) -> dict[Path, TokenDifference]:
    """The first difference of each thread; none: both completions are equal.

    Below a thread that differs nothing is compared. Neither are the lengths of threads that were cut because KV slots ran
    out, nor the children that only one of two such threads has.
    """
    differences: dict[Path, TokenDifference] = {}
    for path in sorted(found.keys() | expected.keys()):
        if any(path[:length] in differences for length in range(len(path))):
            continue
        thread, other = found.get(path), expected.get(path)
        if thread is not None and other is not None:
            difference = _thread_difference(thread, other)
        else:
            parents = [threads.get(path[:-1]) for threads in (found, expected)]
            cut = any(parent is None or parent.cut for parent in parents)
            difference = None if cut else _missing_thread(thread, other)
        if difference is not None:
            differences[path] = difference
    return differences


def _thread_difference(thread: ThreadTokens, other: ThreadTokens) -> TokenDifference | None:
    """The first difference of two threads with the same path."""
    path, start = thread.path, thread.start
    if start != other.start:
        reason = f"the thread begins at position {start}, expected {other.start}"
        return TokenDifference(path, min(start, other.start), start, None, None, reason=reason)
    at = first_difference(thread, other)
    if at is None or ((thread.cut or other.cut) and at >= min(len(thread.tokens), len(other.tokens))):
        return None
    expected, token = (own.tokens[at] if at < len(own.tokens) else None for own in (other, thread))
    reason = f"the thread ends by {thread.ending}, expected {other.ending}" if expected is token is None else ""
    return TokenDifference(path, at, start, expected, token, reason=reason)


def _missing_thread(thread: ThreadTokens | None, other: ThreadTokens | None) -> TokenDifference:
    """The difference of a thread that only one of two completions has."""
    reason = "the thread is missing" if thread is None else "plain decoding has no such thread"
    existing = thread or other
    assert existing is not None
    first = existing.tokens[existing.start] if len(existing.tokens) > existing.start else None
    expected, token = (first, None) if thread is None else (None, first)
    return TokenDifference(existing.path, existing.start, existing.start, expected, token, reason=reason)


def plain_decoding(decoding: Decoding, completion: Completion) -> Decoding:
    """The options that generate a completion again: without drafts and prefix cache, one thread at a time."""
    return replace(
        decoding.without_drafts(),
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
    """Observer of plain decoding that measures the margin of the first other token in each thread of a completion."""

    def __init__(self, completion: Completion, child: int | None, tolerance: float) -> None:
        """Compare with a completion.

        - `child`: Token id of [Child].
        - `tolerance`: The largest change of a logit that rounding explains, relative to the largest logit.
        """
        self._completion = completion
        self._threads = {thread.path: thread for thread in completion.threads}
        self._child = child
        self._tolerance = tolerance
        self._margins: dict[Path, tuple[int, float, float]] = {}  # position, margin, largest margin that is allowed

    def on_step(self, step: RequestStep) -> None:
        """Measure the margin where plain decoding selects another token than the completion has."""
        group = step.sequences
        for part, verdict, logits in zip(step.parts, step.verdicts, step.logits, strict=True):
            thread = part.thread
            completed = self._threads.get(thread.path)
            if not verdict.tokens or completed is None or thread.path in self._margins:
                continue
            token, index = verdict.tokens[0], len(thread.tokens) - thread.start
            if index < len(completed.tokens):
                expected: Collection[int] = {completed.tokens[index]}
            else:  # a stop string has cut tokens off, so only an end token says what comes next
                expected = {"end": group.end, "stop": group.stop}.get(completed.ending, frozenset())
            if token not in expected:
                line = logits[part.layout.known - 1 - int(part.rows_wanted[0])]
                margin = _BOTH_TOKENS * shift_of(group.selector, line, thread, token, expected)
                largest = max(1.0, float(np.abs(line[np.isfinite(line)]).max(initial=0.0)))
                self._margins[thread.path] = len(thread.tokens), margin, _BOTH_TOKENS * self._tolerance * largest

    def differences(self, plain: Completion) -> list[TokenDifference]:
        """The first difference of each thread from the completion that plain decoding has generated; none: equal."""
        found, expected = (thread_tokens_of(completion, self._child) for completion in (self._completion, plain))
        differences = [self._measured(difference) for difference in token_differences(found, expected).values()]
        cut = any(thread.cut for thread in (*found.values(), *expected.values()))
        if not differences and not cut and plain.text != self._completion.text:
            start = len(plain.prompt_tokens)
            return [TokenDifference((), start, start, None, None, reason="the tokens are equal, their text differs")]
        return differences

    def _measured(self, difference: TokenDifference) -> TokenDifference:
        """A difference with its margin, if plain decoding has passed its position."""
        position, margin, allowed = self._margins.get(difference.path, (-1, math.inf, 0.0))
        return difference if position != difference.position else replace(difference, margin=margin, allowed=allowed)


def shift_of(
    selector: TokenSelector, logits: NDArray[np.float32], thread: TokenSequence, token: int, others: Collection[int]
) -> float:
    """By how much two logits have to move towards each other until one of `others` is selected instead of `token`.

    It includes all that selects a token: noise, filters, penalties and grammars. inf: none of them is ever selected.
    """
    return min((_shift(selector, logits, thread, token, other) for other in others), default=math.inf)


def _shift(
    selector: TokenSelector, logits: NDArray[np.float32], thread: TokenSequence, token: int, other: int
) -> float:
    def is_selected(shift: float) -> bool:
        moved = logits.copy()
        moved[token] -= shift
        moved[other] += shift
        try:
            return selector.token(moved, thread, ()) == other
        except (NotANumber, OptionFault):  # of a grammar that allows no token
            return False

    low, high = 0.0, _MOST_SHIFT
    if not is_selected(high):
        return math.inf
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_selected(middle) else (middle, high)
    return high
