"""Live: the threads of a text as they grow side by side on a terminal."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.scheduling.stream import Stream
from spaceport.runtime.text.piece import Path
from spaceport.tools.terminal.lanes import Lane, Lanes, Span

_FRAMES = 12  # a second


class View:
    """The lanes and what they have cost, no higher than the terminal while they grow."""

    def __init__(self, lanes: Lanes, statistics: Statistics) -> None:
        self.whole = False
        self._lanes, self._statistics = lanes, statistics
        self._heard: dict[Path, None] = {}  # the last one wrote last

    def heard(self, path: Path) -> None:
        """A thread has written."""
        self._heard.pop(path, None)
        self._heard[path] = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lanes = list(self._lanes)
        height = None if self.whole else max(1, (options.height or console.height) - 2)
        shown = lanes if height is None else self._latest(lanes, height)
        names = {lane.path: "  " * len(lane.path) + lane.name for lane in shown}
        width = max(1, options.max_width - max(map(len, names.values())) - 1)
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for lane in shown:
            lines = _text(lane).wrap(console, width)
            kept = list(lines if height is None else lines[-max(1, height // len(shown)) :])
            grid.add_row(Text(names[lane.path], "bold" if lane.path == () else "cyan"), Text("\n").join(kept))
        yield grid
        yield Text(self._status(len(lanes) - len(shown)), "dim", no_wrap=True, overflow="ellipsis")

    def _latest(self, lanes: list[Lane], most: int) -> list[Lane]:
        """As many as there is room for: those that wrote last, in their order."""
        latest = [*self._heard][-most:]
        return [lane for lane in lanes if lane.path in latest] or lanes[:most]

    def _status(self, hidden: int) -> str:
        s = self._statistics
        more = f", {hidden} not shown" if hidden else ""
        return (
            f"step {s.steps + s.prompt_steps}: {s.tokens} tokens, {s.tokens_per_step:.2f} a step; "
            f"{s.threads} {'threads' if s.threads > 1 else 'thread'}{more}; at most {s.peak_slots} slots"
        )


def watch(stream: Stream, lanes: Lanes, console: Console | None = None) -> list[Span]:
    """Draw a text until it ends; the whole of it in reading order. Several threads stay on the terminal."""
    view = View(lanes, stream.statistics)
    spans: list[Span] = []
    with Live(view, console=console or Console(), refresh_per_second=_FRAMES) as live:
        for piece in stream:
            spans += lanes.hear(piece)
            view.heard(piece.thread)
        view.whole = len(lanes) > 1
        live.transient = not view.whole
    return spans


def _text(lane: Lane) -> Text:
    text = Text()
    for part, drafted in lane.spans:
        text.append(part, "underline green" if drafted else "")
    return text
