"""What every step of a generation did, as data that can be stored, and read back with checks."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.json_fields import JsonField, Rules, read, short
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.draft import Reason
from spaceport.runtime.decode.sequence import Ending

SCHEMA = 3
_SOURCE = re.compile(r"[a-z_]+(\+[a-z_]+)*")  # names of the sources of a candidate

RowKind = Literal["known", "candidate", "mask"]
# JSON readers disagree on numbers from 2^53 on.
_RULES = Rules(InputFault, advice="; write the trace again", end=2**53)


def _seconds(entry: JsonField) -> float:
    value = entry.value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        entry.refuse("a number of seconds, 0 or more")
    return float(value)


def _texts(entry: JsonField) -> dict[int, str]:
    """The texts of tokens; in JSON the ids are strings."""
    for name in entry.object():
        if not (name.isascii() and name.isdecimal() and len(name) < 16):
            replace(entry, value=name, path=f"a name in {entry.path}").refuse("a token id")
    return {int(name): text.text() for name, text in entry.members().items()}


Seconds = Annotated[float, _seconds]


@dataclass(frozen=True)
class ThreadRows:
    """The rows of one thread in a step, and which tokens they generated."""

    thread: int  # index of the thread in the record
    anchor: int | None  # row of the step with another thread's [Fork] that is the parent of the first row
    tokens: tuple[int, ...]
    # index of each row's parent among these rows; None: the thread's last token in the KV cache
    parents: tuple[int | None, ...]
    positions: tuple[int, ...]
    kinds: tuple[RowKind, ...]
    sources: tuple[str | None, ...]  # of each candidate, such as "mask+lookup"; None for other rows
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


def _thread_rows(entry: JsonField) -> ThreadRows:
    rows: ThreadRows = read(entry, ThreadRows)
    if wrong := _wrong_columns(rows) or _wrong_outcome(rows):
        entry.fail(wrong)
    return rows


@dataclass(frozen=True)
class StepRecord:
    """One call of the engine, as far as it concerned the request."""

    rows: tuple[Annotated[ThreadRows, _thread_rows], ...]  # of each thread that took part
    queued: tuple[int, ...]  # threads that waited, beyond `max_threads`
    started: tuple[int, ...]  # threads whose [Fork] it generated; the root thread starts in the first step
    ended: tuple[int, ...]  # threads that generated nothing after it
    kv_slots: int  # KV slots in use, those of its rows included
    engine_seconds: Seconds
    outside_seconds: Seconds


@dataclass(frozen=True)
class ThreadRecord:
    """A thread as it was when the record was made."""

    path: tuple[int, ...]
    fork: int | None  # position of the [Fork] that started it; None for the root thread
    start: int  # position of its first own token
    ending: Ending | None  # None: it had not ended


@dataclass(frozen=True)
class TraceRecord:
    """What every step of a generation did."""

    tokens: TokenIds
    prompt: tuple[int, ...]
    prompt_text: str  # empty without a tokenizer
    threads: tuple[ThreadRecord, ...]  # the root thread, then the others in the order of their start
    steps: tuple[StepRecord, ...]
    # token id to its text; empty without a tokenizer
    texts: Annotated[dict[int, str], _texts] = field(default_factory=dict)
    waiting_seconds: Seconds = 0.0
    schema: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON data."""
        return asdict(self) | {"texts": {str(token): text for token, text in self.texts.items()}}

    @cached_property
    def generated(self) -> tuple[tuple[int, ...], ...]:
        """The generated tokens of each thread."""
        generated: list[list[int]] = [[] for _ in self.threads]
        for step in self.steps:
            for rows in step.rows:
                generated[rows.thread] += rows.text
        return tuple(map(tuple, generated))


def trace_of(data: object) -> TraceRecord:
    """The record that `TraceRecord.as_dict` stored; raises if anything is missing or unknown."""
    trace = JsonField(data, "trace", _RULES)
    schema = trace.entry("schema").whole(1)
    if schema != SCHEMA:
        advice = "update spaceport" if schema > SCHEMA else "write the trace again"
        raise InputFault(f"trace.schema is {schema}, this version reads {SCHEMA}: {advice}")
    record: TraceRecord = read(trace, TraceRecord)
    _check_names(record)
    _check_threads(record)
    _check_steps(record)
    return record


def _wrong_columns(rows: ThreadRows) -> str:
    """What is wrong with the columns of a thread's rows; empty if nothing is."""
    columns = (rows.tokens, rows.parents, rows.positions, rows.kinds, rows.sources, rows.retained)
    lengths = [len(column) for column in columns]
    if not lengths[0] or len(set(lengths)) > 1:
        return f"has columns of {', '.join(map(str, lengths))} rows: expected equal lengths of at least one row"
    if not rows.known or "known" in rows.kinds[rows.known :] or not all(rows.retained[: rows.known]):
        return "has rows in the wrong order: expected known rows first, at least one, all retained"
    for row, parent in enumerate(rows.parents):
        if parent is not None and parent >= row:
            return f"has the parent {parent} at row {row}: expected a row before it"
        if parent is not None and rows.positions[row] != rows.positions[parent] + 1:
            return f"has the position {rows.positions[row]} at row {row}: expected its parent's plus 1"
        if (rows.sources[row] is None) != (rows.kinds[row] != "candidate"):
            return f"has the source {rows.sources[row]!r} at row {row}: expected a source for candidates only"
        if not _SOURCE.fullmatch(rows.sources[row] or "none"):
            return f"has the source {short(rows.sources[row])} at row {row}: expected names such as mask+lookup"
    return ""


def _wrong_outcome(rows: ThreadRows) -> str:
    """What is wrong with the tokens that a thread's rows generated; empty if nothing is."""
    retained = tuple(rows.tokens[row] for row in rows.candidates if rows.retained[row])
    if retained != rows.chosen[:-1]:
        return f"retains the candidates {short(retained)}: expected all chosen tokens but the last, {short(rows.chosen[:-1])}"
    if any(retained and kind == "mask" for retained, kind in zip(rows.retained, rows.kinds, strict=True)):
        return "retains a mask slot: expected none"
    if rows.generated > len(rows.chosen):
        return f"generates {rows.generated} tokens: expected at most the {len(rows.chosen)} chosen ones"
    if len(rows.pieces) not in (0, rows.generated):
        return f"has {len(rows.pieces)} pieces: expected one for each of the {rows.generated} generated tokens, or none"
    return ""


def _check_names(record: TraceRecord) -> None:
    """Raise if a step names a thread that does not exist."""
    for number, step in enumerate(record.steps):
        for thread in (*(rows.thread for rows in step.rows), *step.queued, *step.started, *step.ended):
            if thread >= len(record.threads):
                raise InputFault(
                    f"trace.steps[{number}] names the thread {thread}: expected one of {len(record.threads)} threads"
                )


def _check_steps(record: TraceRecord) -> None:
    """Raise unless each thread starts and ends once, and generates its tokens without gaps."""
    positions = {index: thread.start for index, thread in enumerate(record.threads)}
    started: set[int] = set()
    ended: set[int] = set()
    for number, step in enumerate(record.steps):
        where = f"trace.steps[{number}]"
        fed = [rows.thread for rows in step.rows]
        early = set(fed) - started - (set() if number else {0})
        if len(set(fed)) < len(fed) or early or started & set(step.started) or ended & {*fed, *step.ended}:
            raise InputFault(f"{where}: expected each thread once in a step, between its start and its end")
        started |= set(step.started)
        ended |= set(step.ended)
        _check_rows(step, where, positions)
    over = {index for index, thread in enumerate(record.threads) if thread.ending is not None}
    if started != set(positions) or ended != over:
        raise InputFault(
            f"trace.steps: {len(started)} threads start and {len(ended)} end: expected all {len(positions)} threads to start, "
            f"and the {len(over)} with an ending to end"
        )


def _check_rows(step: StepRecord, where: str, positions: dict[int, int]) -> None:
    """Raise unless a step generates at these positions, which advance, and its anchors are earlier rows."""
    first = 0
    for rows in step.rows:
        if rows.anchor is not None and rows.anchor >= first:
            raise InputFault(f"{where} has the anchor {rows.anchor}: expected a row before {first}")
        if rows.generated and rows.position != positions[rows.thread]:
            raise InputFault(f"{where} generates at position {rows.position}: expected {positions[rows.thread]}")
        first += len(rows.tokens)
        positions[rows.thread] += rows.generated


def _check_threads(record: TraceRecord) -> None:
    """Raise unless each thread starts at a [Fork] that an earlier thread generated."""
    before: dict[tuple[int, ...], int] = {}
    for index, thread in enumerate(record.threads):
        where = f"trace.threads[{index}]"
        if bool(thread.path) != bool(index) or thread.path in before or (index and thread.path[:-1] not in before):
            raise InputFault(
                f"{where}.path is {list(thread.path)}: expected the root thread, then children of earlier threads"
            )
        before[thread.path] = index
        start = len(record.prompt)
        if index:
            parent = before[thread.path[:-1]]
            own, index_of_fork = record.generated[parent], (thread.fork or 0) - record.threads[parent].start
            if not 0 <= index_of_fork < len(own) or own[index_of_fork] != record.tokens.fork:
                raise InputFault(
                    f"{where}.fork is {thread.fork}: expected the position of a [Fork] that its parent generated"
                )
            start = (thread.fork or 0) + 2
        if thread.start != start or (not index and thread.fork is not None):
            raise InputFault(
                f"{where} starts at {thread.start}, fork {thread.fork}: expected {start}, and a fork for all but the root thread"
            )
