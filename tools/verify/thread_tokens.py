"""Thread tokens: the token sequence of each thread of a completion, and how those of two completions differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.text.transcript import Path


@dataclass(frozen=True)
class ThreadTokens:
    """The tokens of one thread, prompt included."""

    path: Path
    tokens: tuple[int, ...]
    start: int  # position of the first token that the thread generated
    ended: bool = False  # an end token followed
    cut: bool = False  # the KV slots of all threads together ran out: the length says nothing

    @property
    def generated(self) -> int:
        """Number of tokens that the thread generated, end token included."""
        return len(self.tokens) - self.start + self.ended


@dataclass(frozen=True)
class TokenDifference:
    """The first position at which a thread of a completion differs from that of the expected one."""

    thread: Path
    position: int  # in the thread, prompt included
    token: int  # its number, counted from 1 after the prompt or [Child]
    expected: int | None  # token id; None: the expected thread ended before, or there is none
    found: int | None  # token id; None: the thread ended before, or there is none


def thread_tokens_of(completion: Completion, child: int | None) -> dict[Path, ThreadTokens]:
    """The threads of a completion, parents before their children."""
    threads: dict[Path, ThreadTokens] = {}
    for thread in completion.threads:
        before = completion.prompt_tokens
        if thread.fork is not None:
            assert child is not None
            parent = threads[thread.path[:-1]]
            before = (*parent.tokens[: parent.start + thread.fork + 1], child)
        ending = thread.ending
        threads[thread.path] = ThreadTokens(
            thread.path, (*before, *thread.tokens), len(before), ending == "end", ending == "total"
        )
    return threads


def first_difference(thread: ThreadTokens, other: ThreadTokens) -> int | None:
    """The first position at which two threads with the same prefix differ; None if they are equal."""
    shorter = min(len(thread.tokens), len(other.tokens))
    for position in range(thread.start, shorter):
        if thread.tokens[position] != other.tokens[position]:
            return position
    differ = (len(thread.tokens), thread.ended) != (len(other.tokens), other.ended)
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
            position = first_difference(thread, other)
            shorter = min(len(thread.tokens), len(other.tokens))
            if position is not None and not ((thread.cut or other.cut) and position >= shorter):
                differences[path] = _difference_at(position, thread, other)
            continue
        parents = [threads.get(path[:-1]) for threads in (found, expected)]
        if not any(parent is None or parent.cut for parent in parents):
            differences[path] = _difference_at(None, thread, other)
    return differences


def _difference_at(position: int | None, thread: ThreadTokens | None, other: ThreadTokens | None) -> TokenDifference:
    """The difference of two threads at a position; None: at the first token of the only one that exists."""
    existing = thread or other
    assert existing is not None
    at = existing.start if position is None else position
    expected, token = (
        each.tokens[at] if each is not None and at < len(each.tokens) else None for each in (other, thread)
    )
    return TokenDifference(existing.path, at, at - existing.start + 1, expected, token)
