"""Thread tokens: the token sequence of each thread of a completion, from the first prompt token on."""

from __future__ import annotations

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
