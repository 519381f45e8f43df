"""Lanes: the threads of a text side by side, with each of its parts marked as drafted or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import click

from spaceport.runtime.text.piece import Path, Piece


class Span(NamedTuple):
    """A part of a text."""

    text: str
    drafted: bool


@dataclass
class Lane:
    """What one thread wrote so far, and the threads that hang from it where they do."""

    path: Path
    parts: list[Span | Lane] = field(default_factory=list)
    children: int = 0

    @property
    def name(self) -> str:
        """What it is called beside its text."""
        return f"thread {self._number}" if self.path else "spine"

    @property
    def spans(self) -> Iterator[Span]:
        """What it wrote itself; another thread is named in the place where it hangs."""
        for part in self.parts:
            yield Span(f"<{part._number}>", False) if isinstance(part, Lane) else part

    @property
    def _number(self) -> str:
        return ".".join(map(str, self.path))


class Lanes:
    """All threads of a text, heard from its pieces."""

    def __init__(self, fork: int | None) -> None:
        self.spine = Lane(())
        self._fork = fork
        self._lanes: dict[Path, Lane] = {(): self.spine}
        self._order: Iterator[Span] = _reading(self.spine)

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[Lane]:
        """The spine, and behind each thread those that hang from it."""
        return _below(self.spine)

    def hear(self, piece: Piece) -> list[Span]:
        """What can be read of the whole text now that a token more is known, in reading order."""
        lane = self._lanes[piece.thread]
        if piece.text:
            lane.parts.append(Span(piece.text, piece.drafted))
        if piece.token == self._fork:
            child = Lane((*lane.path, lane.children))
            lane.children += 1
            lane.parts.append(child)
            self._lanes[child.path] = child
        return list(self._read(piece.reading))

    def _read(self, reading: str) -> Iterator[Span]:
        while reading:
            text, drafted = next(self._order, Span(reading, False))
            if not text.startswith(reading[: len(text)]):
                # A request that ends all its threads at once lets out text before the pieces that it belongs to.
                self._order, text, drafted = iter(()), reading, False
            yield Span(text[: len(reading)], drafted)
            reading = reading[len(text) :]


def marked(spans: Iterable[Span], terminal: bool, open_bracket: bool = False) -> tuple[str, bool]:
    """Spans as text: drafted ones green on a terminal, elsewhere in brackets, one of which may stay open."""
    found = []
    for text, drafted in spans:
        if terminal:
            found.append(click.style(text, fg="green", underline=True) if drafted else text)
            continue
        if drafted != open_bracket:
            found.append("[" if drafted else "]")
            open_bracket = drafted
        found.append(text)
    return "".join(found), open_bracket


def _reading(lane: Lane) -> Iterator[Span]:
    """All that hangs from a lane in reading order; to be asked for more only when there is more to read."""
    for part in lane.parts:  # grows meanwhile
        if isinstance(part, Lane):
            yield from _reading(part)
        else:
            yield part


def _below(lane: Lane) -> Iterator[Lane]:
    yield lane
    for part in list(lane.parts):
        if isinstance(part, Lane):
            yield from _below(part)
