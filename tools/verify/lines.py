"""Lines: the threads of a text, each as one line of tokens with all that stands before it."""

from __future__ import annotations

from dataclasses import dataclass

from spaceport.runtime.scheduling.generation import Completion

Path = tuple[int, ...]


@dataclass(frozen=True)
class Line:
    """A thread's tokens from the first of the prompt on."""

    path: Path
    tokens: tuple[int, ...]
    start: int  # place of the first token that the thread wrote itself
    ended: bool = False  # an end token followed
    cut: bool = False  # all threads together had no more room: how far it came says nothing

    @property
    def written(self) -> int:
        """How many tokens the thread wrote, the one that ended it among them."""
        return len(self.tokens) - self.start + self.ended


def lines_of(completion: Completion, child: int | None) -> dict[Path, Line]:
    """The threads of a finished text, parents before their children."""
    lines: dict[Path, Line] = {}
    for thread in completion.threads:
        before = completion.prompt_tokens
        if thread.fork is not None:
            assert child is not None
            parent = lines[thread.path[:-1]]
            before = (*parent.tokens[: parent.start + thread.fork + 1], child)
        ending = thread.ending
        lines[thread.path] = Line(
            thread.path, (*before, *thread.tokens), len(before), ending == "end", ending == "total"
        )
    return lines


def parting(line: Line, plain: Line) -> int | None:
    """The first place at which two lines with the same beginning differ; none: they are the same."""
    shorter = min(len(line.tokens), len(plain.tokens))
    for place in range(line.start, shorter):
        if line.tokens[place] != plain.tokens[place]:
            return place
    ends = (len(line.tokens), line.ended) != (len(plain.tokens), plain.ended)
    return shorter if ends else None
