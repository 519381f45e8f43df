"""Thread tokens: the threads of a completion, each as its tokens behind everything that it continues."""

from __future__ import annotations

from dataclasses import dataclass

from spaceport.runtime.scheduling.generation import Completion
from spaceport.runtime.text.piece import Path


@dataclass(frozen=True)
class ThreadTokens:
    """The tokens of a thread from the first one of the prompt."""

    path: Path
    tokens: tuple[int, ...]
    start: int  # place of the first token that the thread wrote itself
    ended: bool = False  # an end token followed
    cut: bool = False  # all threads together had no more room: how far it came says nothing

    @property
    def written(self) -> int:
        """How many tokens the thread wrote, the one that ended it among them."""
        return len(self.tokens) - self.start + self.ended


def thread_tokens_of(completion: Completion, child: int | None) -> dict[Path, ThreadTokens]:
    """The threads of a finished text, parents before their children."""
    lines: dict[Path, ThreadTokens] = {}
    for thread in completion.threads:
        before = completion.prompt_tokens
        if thread.fork is not None:
            assert child is not None
            parent = lines[thread.path[:-1]]
            before = (*parent.tokens[: parent.start + thread.fork + 1], child)
        ending = thread.ending
        lines[thread.path] = ThreadTokens(
            thread.path, (*before, *thread.tokens), len(before), ending == "end", ending == "total"
        )
    return lines


def first_difference(line: ThreadTokens, plain: ThreadTokens) -> int | None:
    """The first place at which two lines with the same beginning differ; none: they are the same."""
    shorter = min(len(line.tokens), len(plain.tokens))
    for place in range(line.start, shorter):
        if line.tokens[place] != plain.tokens[place]:
            return place
    ends = (len(line.tokens), line.ended) != (len(plain.tokens), plain.ended)
    return shorter if ends else None
