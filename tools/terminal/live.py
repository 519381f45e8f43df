"""Live: the threads of a generation, updated on the terminal while they grow."""

from __future__ import annotations

import click
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.scheduling.stream import Stream
from spaceport.runtime.text.transcript import Path
from spaceport.tools.terminal.generation import Lane, Lanes, Span, colour_of, marked

_FRAMES = 12  # per second


class View:
    """The lanes with a status line, limited to the height of the terminal until the generation has ended."""

    def __init__(self, lanes: Lanes, statistics: Statistics) -> None:
        self.complete = False  # True: show all lines
        self._lanes, self._statistics = lanes, statistics
        self._updated: dict[Path, None] = {}  # least recent first

    def mark_updated(self, path: Path) -> None:
        """Note that a thread has grown: the most recent ones are shown if there are too many."""
        self._updated.pop(path, None)
        self._updated[path] = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lanes = list(self._lanes)
        height = None if self.complete else max(1, (options.height or console.height) - 2)
        shown = lanes if height is None else self._latest(lanes, height)
        names = {lane.path: "  " * len(lane.path) + lane.name for lane in shown}
        width = max(1, options.max_width - max(map(len, names.values())) - 1)
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for lane in shown:
            lines = _text(lane).wrap(console, width)
            latest = list(lines if height is None else lines[-max(1, height // len(shown)) :])
            grid.add_row(Text(names[lane.path], "bold" if lane.path == () else "cyan"), Text("\n").join(latest))
        yield grid
        yield Text(self._status(len(lanes) - len(shown)), "dim", no_wrap=True, overflow="ellipsis")

    def _latest(self, lanes: list[Lane], most: int) -> list[Lane]:
        """At most `most` lanes: the most recently updated ones, in reading order."""
        latest = [*self._updated][-most:]
        return [lane for lane in lanes if lane.path in latest] or lanes[:most]

    def _status(self, hidden: int) -> str:
        s = self._statistics
        more = f", {hidden} not shown" if hidden else ""
        return (
            f"step {s.steps + s.prompt_steps}: {s.tokens} tokens, {s.tokens_per_step:.2f} tokens/step, "
            f"{s.threads} {'threads' if s.threads > 1 else 'thread'}{more}, peak {s.peak_slots} KV slots"
        )


def watch(stream: Stream, lanes: Lanes, console: Console | None = None) -> list[Span]:
    """Show a stream until it ends; its text in reading order. The view stays on the terminal if there are several threads."""
    view = View(lanes, stream.statistics)
    spans: list[Span] = []
    with Live(view, console=console or Console(), refresh_per_second=_FRAMES) as live:
        for piece in stream:
            spans += lanes.add(piece)
            view.mark_updated(piece.thread)
        view.complete = len(lanes) > 1
        live.transient = not view.complete
    return spans


def _text(lane: Lane) -> Text:
    text = Text()
    for part, drafted, source in lane.spans:
        text.append(part, f"underline {colour_of(source)}" if drafted else "")
    return text


def show_live(stream: Stream, lanes: Lanes, drafts: bool) -> None:
    """Show all threads while they grow, then the output in reading order."""
    spans = watch(stream, lanes)
    text = marked(spans, True)[0] if drafts else "".join(span.text for span in spans)
    click.echo(f"\n{text}" if len(lanes) > 1 else text)
