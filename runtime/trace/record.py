"""Record: what every step of a generation did, as data that can be stored and read back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.draft import Source
from spaceport.runtime.decode.threads import Ending

SCHEMA = 1

RowKind = Literal["known", "candidate", "mask"]


@dataclass(frozen=True)
class ThreadRows:
    """The rows of one thread in a step, and what came of them."""

    thread: int  # place of the thread among the record's
    anchor: int | None  # row of the step, another thread's [Fork], that the first row hangs from
    tokens: tuple[int, ...]
    parents: tuple[int | None, ...]  # row before each, of the same thread; none: what the thread holds already
    positions: tuple[int, ...]
    kinds: tuple[RowKind, ...]
    sources: tuple[Source | None, ...]  # who proposed each candidate
    kept: tuple[bool, ...]  # whether the thread held the row's slot from then on
    chosen: tuple[int, ...]  # accepted candidates, then the network's own token; none: more of the prompt is to come
    written: int  # how many of the chosen are part of the text: those behind its end are not
    pieces: tuple[str, ...] = ()  # what each written token added to the text; none without a tokenizer

    @property
    def text(self) -> tuple[int, ...]:
        """The tokens that the thread wrote."""
        return self.chosen[: self.written]

    @property
    def accepted(self) -> int:
        """How many of the written tokens were candidates."""
        return min(self.written, max(0, len(self.chosen) - 1))

    @cached_property
    def known(self) -> int:
        """How many rows fed what the thread knew; they come first."""
        return self.kinds.count("known")

    @cached_property
    def candidates(self) -> tuple[int, ...]:
        """The rows that are candidates; those kept stand in the order of the text."""
        return tuple(row for row, kind in enumerate(self.kinds) if kind == "candidate")

    @property
    def place(self) -> int:
        """Place in the text of the first token that may be written."""
        return self.positions[self.known - 1] + 1


@dataclass(frozen=True)
class StepRecord:
    """One call of the engine, as far as it concerned the request."""

    rows: tuple[ThreadRows, ...]  # of each thread that took part
    queued: tuple[int, ...]  # threads that waited for their turn
    began: tuple[int, ...]  # threads whose [Fork] it wrote; the spine begins in the first step
    ended: tuple[int, ...]  # threads that wrote nothing after it
    held: int  # slots, those of its rows included
    engine_seconds: float
    outside_seconds: float


@dataclass(frozen=True)
class ThreadRecord:
    """A thread as it was when the record was made."""

    path: tuple[int, ...]
    fork: int | None  # place of the [Fork] that it hangs from, counted from the beginning of the prompt
    start: int  # place of its first own token
    ending: Ending | None  # none: it had not ended


@dataclass(frozen=True)
class Record:
    """What every step of a generation did."""

    tokens: TokenIds
    prompt: tuple[int, ...]
    prompt_text: str  # empty without a tokenizer
    threads: tuple[ThreadRecord, ...]  # the spine, then each as it began
    steps: tuple[StepRecord, ...]
    texts: dict[int, str] = field(default_factory=dict)  # of each token by itself; empty without a tokenizer
    waiting_seconds: float = 0.0
    schema: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        """What a JSON file holds of it."""
        return asdict(self) | {"texts": {str(token): text for token, text in self.texts.items()}}

    @cached_property
    def written(self) -> tuple[tuple[int, ...], ...]:
        """The own tokens of each thread."""
        found: list[list[int]] = [[] for _ in self.threads]
        for step in self.steps:
            for rows in step.rows:
                found[rows.thread] += rows.text
        return tuple(map(tuple, found))
