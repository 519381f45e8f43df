"""Story: the text of all threads in reading order, each token marked by where it came from."""

from __future__ import annotations

from collections.abc import Sequence

from spaceport.runtime.trace.record import Record
from spaceport.tools.report.drawing import Element, add, new
from spaceport.tools.report.lane_drawing import hue
from spaceport.tools.report.lanes import Cell, TraceLane
from spaceport.tools.report.words import name_of, visible


def story_of(record: Record, lanes: Sequence[TraceLane]) -> Element:
    """The text: a child stands where its parent's [Fork] does; a target for each thread's part of each step."""
    story = new("div", {"class": "story"})
    if lanes:
        _Telling(record, lanes).tell(story, lanes[0])
    return story


class _Telling:
    def __init__(self, record: Record, lanes: Sequence[TraceLane]) -> None:
        self._record = record
        self._children = {(lane.parent, lane.record.fork): lane for lane in lanes if lane.depth}

    def tell(self, story: Element, lane: TraceLane) -> None:
        """What a thread wrote, with all that hangs from it."""
        text = self._begin(story, lane)
        place = lane.record.start
        for cell in lane.cells:
            run = self._run(text, lane, cell)
            for index, token in enumerate(cell.rows.text):
                self._write(run, cell, index, token)
                if child := self._children.get((lane.thread, place)):
                    self.tell(story, child)
                    text = add(story, "span", {"class": hue(lane)})
                    run = add(text, "span")
                place += 1

    def _begin(self, story: Element, lane: TraceLane) -> Element:
        """The part of the story that a thread's text begins with."""
        text = add(story, "span", {"class": hue(lane)})
        if lane.depth:
            add(
                text,
                "a",
                {"class": "child", "href": f"#lane-{lane.thread}", "title": f"{lane.name} begins"},
                ".".join(map(str, lane.record.path)),
            )
        return text

    def _run(self, text: Element, lane: TraceLane, cell: Cell) -> Element:
        """The part that a step wrote."""
        return add(text, "span", {"id": f"s{cell.step}-{lane.thread}"})

    def _write(self, run: Element, cell: Cell, index: int, token: int) -> None:
        rows, record = cell.rows, self._record
        drafted = index < rows.accepted
        text = rows.pieces[index] if rows.pieces else f"{name_of(record, token)} "
        title = f"step {cell.step}: {name_of(record, token)}, {'drafted' if drafted else 'own'}"
        add(run, "b" if drafted else "i", {"title": title}, visible(text))
