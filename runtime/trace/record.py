"""Record: what every step of a generation did, as data that can be stored and read back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.draft import Reason, Source
from spaceport.runtime.decode.threads import Ending

SCHEMA = 2

RowKind = Literal["known", "candidate", "mask"]


@dataclass(frozen=True)
class ThreadRows:
    """The rows of one thread in a step, and which tokens they generated."""

    thread: int  # index of the thread in the record
    anchor: int | None  # row of the step with another thread's [Fork] that is the parent of the first row
    tokens: tuple[int, ...]
    parents: tuple[
        int | None, ...
    ]  # index of each row's parent among these rows; None: the thread's last token in the KV cache
    positions: tuple[int, ...]
    kinds: tuple[RowKind, ...]
    sources: tuple[Source | None, ...]  # source of each candidate; None for other rows
    retained: tuple[bool, ...]  # whether the row's KV slot was retained
    chosen: tuple[int, ...]  # accepted candidates, then the model's own next token; empty in a prefill chunk
    generated: int  # number of chosen tokens that belong to the completion: those before its end
    pieces: tuple[str, ...] = ()  # text that each generated token added; empty without a tokenizer
    limited: Reason | None = None  # why the draft is narrower than its limits allow; None: it is not

    @property
    def text(self) -> tuple[int, ...]:
        """The tokens that the thread generated."""
        return self.chosen[: self.generated]

    @property
    def accepted(self) -> int:
        """Number of generated tokens that were accepted candidates."""
        return min(self.generated, max(0, len(self.chosen) - 1))

    @cached_property
    def known(self) -> int:
        """Number of rows of known tokens; they come first."""
        return self.kinds.count("known")

    @cached_property
    def candidates(self) -> tuple[int, ...]:
        """The rows of candidates; the retained ones are in the order of the text."""
        return tuple(row for row, kind in enumerate(self.kinds) if kind == "candidate")

    @property
    def position(self) -> int:
        """Position of the first token that the step can generate."""
        return self.positions[self.known - 1] + 1


@dataclass(frozen=True)
class StepRecord:
    """One call of the engine, as far as it concerned the request."""

    rows: tuple[ThreadRows, ...]  # of each thread that took part
    queued: tuple[int, ...]  # threads that waited, beyond `max_threads`
    started: tuple[int, ...]  # threads whose [Fork] it generated; the root thread starts in the first step
    ended: tuple[int, ...]  # threads that generated nothing after it
    kv_slots: int  # KV slots in use, those of its rows included
    engine_seconds: float
    outside_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The step as JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class ThreadRecord:
    """A thread as it was when the record was made."""

    path: tuple[int, ...]
    fork: int | None  # position of the [Fork] that started it; None for the root thread
    start: int  # position of its first own token
    ending: Ending | None  # None: it had not ended

    def as_dict(self) -> dict[str, Any]:
        """The thread as JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class Record:
    """What every step of a generation did."""

    tokens: TokenIds
    prompt: tuple[int, ...]
    prompt_text: str  # empty without a tokenizer
    threads: tuple[ThreadRecord, ...]  # the root thread, then the others in the order of their start
    steps: tuple[StepRecord, ...]
    texts: dict[int, str] = field(default_factory=dict)  # token id to its text; empty without a tokenizer
    waiting_seconds: float = 0.0
    schema: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON data."""
        return asdict(self) | {"texts": {str(token): text for token, text in self.texts.items()}}

    @cached_property
    def generated(self) -> tuple[tuple[int, ...], ...]:
        """The generated tokens of each thread."""
        found: list[list[int]] = [[] for _ in self.threads]
        for step in self.steps:
            for rows in step.rows:
                found[rows.thread] += rows.text
        return tuple(map(tuple, found))
