"""Annotated text: the text of all threads in reading order, with accepted draft tokens marked."""

from __future__ import annotations

from collections.abc import Sequence

from spaceport.runtime.trace.record import Record
from spaceport.tools.report.drawing import Element, add, new
from spaceport.tools.report.lane_drawing import hue
from spaceport.tools.report.lanes import Cell, TraceLane
from spaceport.tools.report.words import name_of, visible


def annotated_text(record: Record, lanes: Sequence[TraceLane]) -> Element:
    """The text with each child thread at its [Fork], and a link target for each thread and step."""
    text = new("div", {"class": "generated"})
    if lanes:
        _Writer(record, lanes).write(text, lanes[0])
    return text


class _Writer:
    def __init__(self, record: Record, lanes: Sequence[TraceLane]) -> None:
        self._record = record
        self._children = {(lane.parent, lane.record.fork): lane for lane in lanes if lane.depth}

    def write(self, parent: Element, lane: TraceLane) -> None:
        """Add the text of a thread and of its child threads."""
        text = self._begin(parent, lane)
        position = lane.record.start
        for cell in lane.cells:
            run = self._run(text, lane, cell)
            for index, token in enumerate(cell.rows.text):
                self._add_token(run, cell, index, token)
                if child := self._children.get((lane.thread, position)):
                    self.write(parent, child)
                    text = add(parent, "span", {"class": hue(lane)})
                    run = add(text, "span")
                position += 1

    def _begin(self, parent: Element, lane: TraceLane) -> Element:
        """Add the start of a thread: for a child thread, a link to its lane."""
        text = add(parent, "span", {"class": hue(lane)})
        if lane.depth:
            add(
                text,
                "a",
                {"class": "child", "href": f"#lane-{lane.thread}", "title": f"start of {lane.name}"},
                ".".join(map(str, lane.record.path)),
            )
        return text

    def _run(self, text: Element, lane: TraceLane, cell: Cell) -> Element:
        """Add the element of a step's tokens."""
        return add(text, "span", {"id": f"s{cell.step}-{lane.thread}"})

    def _add_token(self, run: Element, cell: Cell, index: int, token: int) -> None:
        rows, record = cell.rows, self._record
        drafted = index < rows.accepted
        text = rows.pieces[index] if rows.pieces else f"{name_of(record, token)} "
        title = f"step {cell.step}: {name_of(record, token)}, {'accepted draft token' if drafted else 'own token of the model'}"
        add(run, "b" if drafted else "i", {"title": title}, visible(text))
