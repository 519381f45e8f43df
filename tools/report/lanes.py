"""Lanes: the threads of a recorded generation with their rows in each step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from spaceport.runtime.decode.draft import REASONS
from spaceport.runtime.trace.record import ThreadRecord, ThreadRows, TraceRecord
from spaceport.tools.report.words import counted, name_of, name_of_thread, names_of


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
