"""Lane: a thread of a recorded generation with what it did in each step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from spaceport.runtime.trace.record import Record, ThreadRecord, ThreadRows
from spaceport.tools.report.words import counted, name_of, name_of_thread, names_of


@dataclass(frozen=True)
class Cell:
    """What a thread did in a step."""

    step: int  # from 1, as a reader counts
    rows: ThreadRows
    ending: str = ""  # of the thread, if it wrote nothing after this step

    @cached_property
    def rejected(self) -> tuple[int, ...]:
        """The rows of the candidates that were not accepted."""
        return tuple(row for row in self.rows.candidates if not self.rows.kept[row])


@dataclass(frozen=True)
class TraceLane:
    """A thread with what it did in each step that it took part in."""

    thread: int  # place of it in the record
    record: ThreadRecord
    cells: tuple[Cell, ...]
    parent: int  # thread that it hangs from; its own place: it is the spine
    hangs: int  # step that wrote its [Fork]; 0: it is the spine
    waits: int  # steps that it waited for its turn after that
    order: int  # of reading, from 0

    @property
    def name(self) -> str:
        return name_of_thread(self.record)

    @property
    def depth(self) -> int:
        """How many forks lead to it."""
        return len(self.record.path)

    @cached_property
    def written(self) -> int:
        """How many tokens it wrote."""
        return sum(cell.rows.written for cell in self.cells)

    @cached_property
    def accepted(self) -> int:
        """How many of them were candidates."""
        return sum(cell.rows.accepted for cell in self.cells)

    @cached_property
    def most(self) -> int:
        """The most tokens that it wrote in one step."""
        return max((cell.rows.written for cell in self.cells), default=0)


def lanes_of(record: Record) -> tuple[TraceLane, ...]:
    """The threads in reading order: each before those that hang from it."""
    count = len(record.threads)
    cells: list[list[Cell]] = [[] for _ in range(count)]
    hangs, waits = [0] * count, [0] * count
    for number, step in enumerate(record.steps, 1):
        for rows in step.rows:
            ending = record.threads[rows.thread].ending if rows.thread in step.ended else None
            cells[rows.thread].append(Cell(number, rows, ending or ""))
        for thread in step.queued:
            waits[thread] += 1
        for thread in step.began:
            hangs[thread] = number if record.threads[thread].path else 0
    places = {of_thread.path: thread for thread, of_thread in enumerate(record.threads)}
    return tuple(
        TraceLane(
            place, record.threads[place], tuple(cells[place]), places[path[:-1]], hangs[place], waits[place], order
        )
        for order, (path, place) in enumerate(sorted(places.items()))
    )


def told(record: Record, cell: Cell) -> str:
    """All that a thread did in a step, in a few lines of text."""
    rows = cell.rows
    lines = [f"step {cell.step}, {name_of_thread(record.threads[rows.thread])}"]
    if (fed := len(record.prompt) - rows.positions[0]) > 0:
        lines.append(f"feeds {counted(min(fed, rows.known), 'token')} of the prompt")
    if rows.accepted:
        lines.append(f"accepted: {names_of(record, rows.text[: rows.accepted])}")
    if rows.written > rows.accepted:
        lines.append(f"own: {names_of(record, rows.text[rows.accepted :])}")
    if behind := rows.chosen[rows.written :]:
        lines.append(f"behind the end: {names_of(record, behind)}")
    if cell.rejected:
        proposed = (f"{name_of(record, rows.tokens[row])} ({rows.sources[row]})" for row in cell.rejected)
        lines.append(f"rejected: {' '.join(proposed)}")
    kinds = (f"{rows.kinds.count(kind)} {kind}" for kind in ("known", "candidate", "mask") if kind in rows.kinds)
    lines.append(f"rows: {', '.join(kinds)}")
    if cell.ending:
        lines.append(f"ends: {cell.ending}")
    return "\n".join(lines)
