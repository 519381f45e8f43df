"""Lanes: the threads, rows, statistics and readable names of a recorded generation."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from spaceport.runtime.decode.draft import REASONS
from spaceport.runtime.decode.sequence_group import MOST_STEPS, Statistics
from spaceport.runtime.trace import StepRecord, ThreadRecord, ThreadRows, TraceRecord

_JOINERS = "\u200c\u200d"  # needed inside words and emoji
_NO_CHARACTERS = range(0xFDD0, 0xFDF0)


def visible(text: str) -> str:
    """Text with invisible and invalid characters replaced by their codes."""
    return text if text.isprintable() else "".join(map(_shown, text))


def quoted(text: str) -> str:
    """Text in quotes on one line, so that its spaces are visible."""
    return f"“{visible(text).replace(chr(10), '⏎').replace(chr(9), '⇥')}”"


def counted(count: int, thing: str) -> str:
    """A count with its noun in singular or plural."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def name_of(record: TraceRecord, token: int) -> str:
    """The text of a token, its role such as [Fork], or its id."""
    if text := record.texts.get(token):
        return quoted(text)
    tokens = record.tokens
    roles = dict.fromkeys(tokens.mask, "[M]") | dict.fromkeys(tokens.end, "[End]")
    return (roles | {tokens.fork: "[Fork]", tokens.child: "[Child]"}).get(token, f"#{token}")


def names_of(record: TraceRecord, tokens: Iterable[int]) -> str:
    """The names of tokens, separated by spaces."""
    return " ".join(name_of(record, token) for token in tokens)


def name_of_thread(thread: ThreadRecord) -> str:
    """The name of a thread: root, or its path."""
    return f"thread {'.'.join(map(str, thread.path))}" if thread.path else "root"


def _shown(character: str) -> str:
    """The character, or its code if it is invisible, changes the direction of text or is invalid."""
    code = ord(character)
    if character in "\n\t" or character in _JOINERS:
        return character
    invisible = unicodedata.category(character) in ("Cc", "Cf", "Cs")
    if invisible or code in _NO_CHARACTERS or code & 0xFFFE == 0xFFFE:
        return f"⟨{code:02X}⟩"
    return character


def statistics_of(record: TraceRecord) -> Statistics:
    """The statistics of the request at its end, without padding rows, which belong to calls of several requests."""
    found = Statistics(prompt_tokens=len(record.prompt), threads=len(record.threads))
    found.waiting_seconds = record.waiting_seconds
    for step in record.steps:
        _count(found, step)
        before = sum(found.accepted_by_depth)
        for rows in step.rows:
            _count_drafts(found, rows)
        if any(rows.chosen for rows in step.rows) and len(found.drafted_by_step) < MOST_STEPS:
            found.drafted_by_step.append(sum(len(rows.candidates) for rows in step.rows))
            found.accepted_by_step.append(sum(found.accepted_by_depth) - before)
    return found


def _count(found: Statistics, step: StepRecord) -> None:
    found.rows += sum(len(rows.tokens) for rows in step.rows)
    found.peak_slots = max(found.peak_slots, step.kv_slots)
    found.peak_threads = max(found.peak_threads, len(step.rows))
    found.engine_seconds += step.engine_seconds
    found.outside_seconds += step.outside_seconds
    if any(rows.chosen for rows in step.rows):
        found.steps += 1
    else:
        found.prompt_steps += 1


def _count_drafts(found: Statistics, rows: ThreadRows) -> None:
    found.tokens += rows.generated
    found.candidate_rows += len(rows.candidates)
    found.mask_rows += rows.kinds.count("mask")
    if rows.limited is not None:
        found.drafts_limited[rows.limited] = found.drafts_limited.get(rows.limited, 0) + 1
    accepted = [row for row in rows.candidates if rows.retained[row]][: rows.accepted]
    for row in rows.candidates:
        depth, source = rows.positions[row] - rows.position, rows.sources[row]
        assert source is not None
        while len(found.drafted_by_depth) <= depth:
            found.drafted_by_depth.append(0)
            found.accepted_by_depth.append(0)
        found.drafted_by_depth[depth] += 1
        found.drafted_by_source[source] = found.drafted_by_source.get(source, 0) + 1
        if row in accepted:
            found.accepted_by_depth[depth] += 1
            found.accepted_by_source[source] = found.accepted_by_source.get(source, 0) + 1


@dataclass(frozen=True)
class Cell:
    """The rows of a thread in one step."""

    step: int  # counted from 1
    rows: ThreadRows
    ending: str = ""  # ending of the thread, if this is its last step

    @cached_property
    def rejected(self) -> tuple[int, ...]:
        """Row indices of rejected candidates."""
        return tuple(row for row in self.rows.candidates if not self.rows.retained[row])


@dataclass(frozen=True)
class TraceLane:
    """A thread with its rows in each step."""

    thread: int  # index in the record
    record: ThreadRecord
    cells: tuple[Cell, ...]
    parent: int  # index of the parent thread; its own index for the root thread
    forked: int  # step that generated its [Fork]; 0 for the root thread
    queued: int  # steps that it was queued after that
    order: int  # index in reading order

    @property
    def name(self) -> str:
        return name_of_thread(self.record)

    @property
    def depth(self) -> int:
        """Number of forks above it; 0 for the root thread."""
        return len(self.record.path)

    @cached_property
    def generated(self) -> int:
        """Number of generated tokens."""
        return sum(cell.rows.generated for cell in self.cells)

    @cached_property
    def accepted(self) -> int:
        """Number of accepted draft tokens."""
        return sum(cell.rows.accepted for cell in self.cells)

    @cached_property
    def most(self) -> int:
        """Maximum number of tokens in one step."""
        return max((cell.rows.generated for cell in self.cells), default=0)


def lanes_of(record: TraceRecord) -> tuple[TraceLane, ...]:
    """The threads in reading order: each one before its child threads."""
    count = len(record.threads)
    cells: list[list[Cell]] = [[] for _ in range(count)]
    forked, queued = [0] * count, [0] * count
    for number, step in enumerate(record.steps, 1):
        for rows in step.rows:
            ending = record.threads[rows.thread].ending if rows.thread in step.ended else None
            cells[rows.thread].append(Cell(number, rows, ending or ""))
        for thread in step.queued:
            queued[thread] += 1
        for thread in step.started:
            forked[thread] = number if record.threads[thread].path else 0
    indices = {of_thread.path: thread for thread, of_thread in enumerate(record.threads)}
    return tuple(
        TraceLane(
            index, record.threads[index], tuple(cells[index]), indices[path[:-1]], forked[index], queued[index], order
        )
        for order, (path, index) in enumerate(sorted(indices.items()))
    )


def describe(record: TraceRecord, cell: Cell) -> str:
    """The rows of a thread in a step as lines of text, for a tooltip."""
    rows = cell.rows
    lines = [f"step {cell.step}, {name_of_thread(record.threads[rows.thread])}"]
    if (fed := len(record.prompt) - rows.positions[0]) > 0:
        lines.append(f"prefill: {counted(min(fed, rows.known), 'token')} of the prompt")
    if rows.accepted:
        lines.append(f"accepted: {names_of(record, rows.text[: rows.accepted])}")
    if rows.generated > rows.accepted:
        lines.append(f"own token: {names_of(record, rows.text[rows.accepted :])}")
    if discarded := rows.chosen[rows.generated :]:
        lines.append(f"discarded after the end: {names_of(record, discarded)}")
    if cell.rejected:
        proposed = (f"{name_of(record, rows.tokens[row])} ({rows.sources[row]})" for row in cell.rejected)
        lines.append(f"rejected: {' '.join(proposed)}")
    kinds = (f"{rows.kinds.count(kind)} {kind}" for kind in ("known", "candidate", "mask") if kind in rows.kinds)
    lines.append(f"rows: {', '.join(kinds)}")
    if rows.limited is not None:
        lines.append(f"draft limited: {REASONS[rows.limited]}")
    if cell.ending:
        lines.append(f"ends: {cell.ending}")
    return "\n".join(lines)
