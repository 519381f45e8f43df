"""Reader: a trace record from parsed JSON, after everything in it has been checked."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.json_fields import JsonField, Rules, short
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.draft import Source
from spaceport.runtime.decode.threads import Ending
from spaceport.runtime.trace.record import SCHEMA, Record, RowKind, StepRecord, ThreadRecord, ThreadRows

_KINDS: tuple[RowKind, ...] = get_args(RowKind)
_SOURCES: tuple[Source, ...] = get_args(Source)
_ENDINGS: tuple[Ending, ...] = get_args(Ending)
# Numbers from 2^53 on are not the same in every reader of JSON.
_RULES = Rules(InputFault, advice="; write the trace again", end=2**53)


def trace_of(data: object) -> Record:
    """The record that `Record.as_dict` made; nothing may be missing and nothing more be there."""
    found = JsonField(data, "trace", _RULES)
    schema = found.entry("schema").whole(1)
    if schema > SCHEMA:
        raise InputFault(f"trace.schema is {schema}, this version reads up to {SCHEMA}: update spaceport")
    told = found.entries(Record)
    record = Record(
        tokens=_tokens(told["tokens"]),
        prompt=told["prompt"].wholes(),
        prompt_text=told["prompt_text"].text(),
        threads=told["threads"].each(_thread),
        steps=told["steps"].each(_step),
        texts=_texts(told["texts"]),
        waiting_seconds=_seconds(told["waiting_seconds"]),
        schema=schema,
    )
    _hold_names(record)
    _hold_threads(record)
    _hold_steps(record)
    return record


def _seconds(found: JsonField) -> float:
    value = found.value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        found.refuse("a number of seconds, 0 or more")
    return float(value)


def _texts(found: JsonField) -> dict[int, str]:
    """The texts of tokens; JSON has their ids as text."""
    for name in found.object():
        if not (name.isascii() and name.isdecimal() and len(name) < 16):
            replace(found, value=name, path=f"a name in {found.path}").refuse("a token id")
    return {int(name): text for name, text in found.texts().items()}


def _tokens(found: JsonField) -> TokenIds:
    told = found.entries(TokenIds)
    return TokenIds(
        mask=told["mask"].wholes(),
        fork=told["fork"].or_none(JsonField.whole),
        child=told["child"].or_none(JsonField.whole),
        end=told["end"].wholes(),
    )


def _thread(found: JsonField) -> ThreadRecord:
    told = found.entries(ThreadRecord)
    return ThreadRecord(
        path=told["path"].wholes(),
        fork=told["fork"].or_none(JsonField.whole),
        start=told["start"].whole(),
        ending=told["ending"].or_none(lambda ending: ending.one_of(_ENDINGS)),
    )


def _step(found: JsonField) -> StepRecord:
    told = found.entries(StepRecord)
    return StepRecord(
        rows=told["rows"].each(_rows),
        queued=told["queued"].wholes(),
        began=told["began"].wholes(),
        ended=told["ended"].wholes(),
        held=told["held"].whole(),
        engine_seconds=_seconds(told["engine_seconds"]),
        outside_seconds=_seconds(told["outside_seconds"]),
    )


def _rows(found: JsonField) -> ThreadRows:
    told = found.entries(ThreadRows)
    rows = ThreadRows(
        thread=told["thread"].whole(),
        anchor=told["anchor"].or_none(JsonField.whole),
        tokens=told["tokens"].wholes(),
        parents=told["parents"].each(lambda parent: parent.or_none(JsonField.whole)),
        positions=told["positions"].wholes(),
        kinds=told["kinds"].each(lambda kind: kind.one_of(_KINDS)),
        sources=told["sources"].each(lambda source: source.or_none(lambda one: one.one_of(_SOURCES))),
        kept=told["kept"].each(JsonField.boolean),
        chosen=told["chosen"].wholes(),
        written=told["written"].whole(),
        pieces=told["pieces"].each(JsonField.text),
    )
    if wrong := _wrong_columns(rows) or _wrong_outcome(rows):
        found.fail(wrong)
    return rows


def _wrong_columns(rows: ThreadRows) -> str:
    """What is wrong with the shape of a thread's rows."""
    columns = (rows.tokens, rows.parents, rows.positions, rows.kinds, rows.sources, rows.kept)
    lengths = [len(column) for column in columns]
    if not lengths[0] or len(set(lengths)) > 1:
        return f"has columns of {', '.join(map(str, lengths))} rows: expected as many in each, one at least"
    if not rows.known or "known" in rows.kinds[rows.known :] or not all(rows.kept[: rows.known]):
        return "mixes its kinds of rows: expected known ones first, one at least, all of them kept"
    for row, parent in enumerate(rows.parents):
        if parent is not None and parent >= row:
            return f"has the parent {parent} at row {row}: expected a row before it"
        if parent is not None and rows.positions[row] != rows.positions[parent] + 1:
            return f"has the position {rows.positions[row]} at row {row}: expected its parent's and 1"
        if (rows.sources[row] is None) != (rows.kinds[row] != "candidate"):
            return f"has the source {rows.sources[row]!r} at row {row}: expected one for each candidate only"
    return ""


def _wrong_outcome(rows: ThreadRows) -> str:
    """What is wrong with what came of a thread's rows."""
    kept = tuple(rows.tokens[row] for row in rows.candidates if rows.kept[row])
    if kept != rows.chosen[:-1]:
        return f"keeps the candidates {short(kept)}: expected those chosen before the last, {short(rows.chosen[:-1])}"
    if any(kept and kind == "mask" for kept, kind in zip(rows.kept, rows.kinds, strict=True)):
        return "keeps a mask: expected none"
    if rows.written > len(rows.chosen):
        return f"writes {rows.written} tokens: expected at most the {len(rows.chosen)} chosen"
    if len(rows.pieces) not in (0, rows.written):
        return f"has {len(rows.pieces)} pieces: expected one for each of the {rows.written} tokens written, or none"
    return ""


def _hold_names(record: Record) -> None:
    """Raise unless the steps name threads that there are."""
    for number, step in enumerate(record.steps):
        for thread in (*(rows.thread for rows in step.rows), *step.queued, *step.began, *step.ended):
            if thread >= len(record.threads):
                raise InputFault(
                    f"trace.steps[{number}] names the thread {thread}: expected one of the {len(record.threads)} there are"
                )


def _hold_steps(record: Record) -> None:
    """Raise unless what each thread wrote follows what it had written before, and it begins and ends once."""
    places = {index: thread.start for index, thread in enumerate(record.threads)}
    begun: set[int] = set()
    ended: set[int] = set()
    for number, step in enumerate(record.steps):
        where = f"trace.steps[{number}]"
        fed = [rows.thread for rows in step.rows]
        early = set(fed) - begun - (set() if number else {0})
        if len(set(fed)) < len(fed) or early or begun & set(step.began) or ended & {*fed, *step.ended}:
            raise InputFault(f"{where}: expected each thread once in a step, between its beginning and its end")
        begun |= set(step.began)
        ended |= set(step.ended)
        _hold_rows(step, where, places)
    over = {index for index, thread in enumerate(record.threads) if thread.ending is not None}
    if begun != set(places) or ended != over:
        raise InputFault(
            f"trace.steps: {len(begun)} threads begin and {len(ended)} end: expected the {len(places)} that there are and "
            f"the {len(over)} that have an ending"
        )


def _hold_rows(step: StepRecord, where: str, places: dict[int, int]) -> None:
    """Raise unless a step's rows hang from rows of it and write at these places; the places move on."""
    first = 0
    for rows in step.rows:
        if rows.anchor is not None and rows.anchor >= first:
            raise InputFault(f"{where} has the anchor {rows.anchor}: expected a row before {first}")
        if rows.written and rows.place != places[rows.thread]:
            raise InputFault(f"{where} writes at place {rows.place}: expected {places[rows.thread]}")
        first += len(rows.tokens)
        places[rows.thread] += rows.written


def _hold_threads(record: Record) -> None:
    """Raise unless each thread hangs from a [Fork] that a thread before it wrote."""
    before: dict[tuple[int, ...], int] = {}
    for index, thread in enumerate(record.threads):
        where = f"trace.threads[{index}]"
        if bool(thread.path) != bool(index) or thread.path in before or (index and thread.path[:-1] not in before):
            raise InputFault(
                f"{where}.path is {list(thread.path)}: expected the spine, then children of threads before"
            )
        before[thread.path] = index
        start = len(record.prompt)
        if index:
            parent = before[thread.path[:-1]]
            own, place = record.written[parent], (thread.fork or 0) - record.threads[parent].start
            if not 0 <= place < len(own) or own[place] != record.tokens.fork:
                raise InputFault(f"{where}.fork is {thread.fork}: expected the place of a [Fork] that its parent wrote")
            start = (thread.fork or 0) + 2
        if thread.start != start or (not index and thread.fork is not None):
            raise InputFault(
                f"{where} starts at {thread.start}, fork {thread.fork}: expected {start}, and a fork unless first"
            )
