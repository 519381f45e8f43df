"""Lanes: the text of each thread of a generation, with accepted draft tokens marked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import click

from spaceport.runtime.text.transcript import Path, Piece

_COLOURS: Mapping[str | None, str] = {None: "green", "mask": "green", "head": "green", "lookup": "cyan"}
_OTHER_COLOUR = "magenta"  # of several sources, and of others


class Span(NamedTuple):
    """A part of a thread's text."""

    text: str
    drafted: bool  # an accepted draft token; False: the model's own token
    source: str | None = None  # what proposed it


@dataclass
class Lane:
    """The text of one thread so far, with its child threads at the positions where it forks."""

    path: Path
    parts: list[Span | Lane] = field(default_factory=list)
    children: int = 0

    @property
    def name(self) -> str:
        """The label beside the text."""
        return f"thread {self._number}" if self.path else "root"

    @property
    def spans(self) -> Iterator[Span]:
        """The text of this thread alone; each child thread is a marker such as <0>."""
        for part in self.parts:
            yield Span(f"<{part._number}>", False) if isinstance(part, Lane) else part

    @property
    def _number(self) -> str:
        return ".".join(map(str, self.path))


class Lanes:
    """All threads of a generation, built from the pieces of its stream."""

    def __init__(self, fork: int | None) -> None:
        self.root = Lane(())
        self._fork = fork
        self._lanes: dict[Path, Lane] = {(): self.root}
        self._order: Iterator[Span] = _reading(self.root)

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[Lane]:
        """The threads in reading order: each one before its child threads."""
        return _below(self.root)

    def add(self, piece: Piece) -> list[Span]:
        """Add a piece; the spans that it appends to the text in reading order."""
        lane = self._lanes[piece.thread]
        if piece.text:
            lane.parts.append(Span(piece.text, piece.drafted, piece.source))
        if piece.token == self._fork:
            child = Lane((*lane.path, lane.children))
            lane.children += 1
            lane.parts.append(child)
            self._lanes[child.path] = child
        return list(self._read(piece.reading))

    def _read(self, reading: str) -> Iterator[Span]:
        while reading:
            text, drafted, source = next(self._order, Span(reading, False))
            if not text.startswith(reading[: len(text)]):
                # When all threads end at once, text is released before the pieces that it belongs to.
                self._order, text, drafted, source = iter(()), reading, False, None
            yield Span(text[: len(reading)], drafted, source)
            reading = reading[len(text) :]


def colour_of(source: str | None) -> str:
    """The colour of draft tokens of a source."""
    return _COLOURS.get(source, _OTHER_COLOUR)


def marked(spans: Iterable[Span], terminal: bool, open_bracket: bool = False) -> tuple[str, bool]:
    """Spans as text, drafted ones underlined on a terminal, in the colour of their source, and in [brackets] elsewhere; whether a bracket is still open."""
    found = []
    for text, drafted, source in spans:
        if terminal:
            colour = None if os.environ.get("NO_COLOR") else colour_of(source)
            found.append(click.style(text, fg=colour, underline=True) if drafted else text)
            continue
        if drafted != open_bracket:
            found.append("[" if drafted else "]")
            open_bracket = drafted
        found.append(text)
    return "".join(found), open_bracket


def _reading(lane: Lane) -> Iterator[Span]:
    """The spans of a lane and of its child threads in reading order; do not ask for more than was added."""
    for part in lane.parts:  # grows while it is read
        if isinstance(part, Lane):
            yield from _reading(part)
        else:
            yield part


def _below(lane: Lane) -> Iterator[Lane]:
    yield lane
    for part in list(lane.parts):
        if isinstance(part, Lane):
            yield from _below(part)
