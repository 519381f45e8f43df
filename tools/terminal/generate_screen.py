"""Generate screen: a text as it is written, what it cost, and both as JSON."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import click

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.scheduling.generation import Completion
from spaceport.runtime.scheduling.stream import Stream
from spaceport.tools.terminal.lanes import Lanes, marked


def show(stream: Stream, lanes: Lanes, drafts: bool) -> None:
    """The text in reading order, each part as soon as nothing before it is missing."""
    terminal, open_bracket = sys.stdout.isatty(), False
    for piece in stream:
        text = piece.reading
        if drafts:
            text, open_bracket = marked(lanes.hear(piece), terminal, open_bracket)
        if text:
            click.echo(text, nl=False)
            sys.stdout.flush()
    click.echo("]" if open_bracket else "")


def show_live(stream: Stream, lanes: Lanes, drafts: bool) -> None:
    """The threads as they grow side by side, then the text."""
    from spaceport.tools.terminal.live import watch

    spans = watch(stream, lanes)
    text = marked(spans, True)[0] if drafts else "".join(span.text for span in spans)
    click.echo(f"\n{text}" if len(lanes) > 1 else text)


def show_lanes(lanes: Lanes) -> None:
    """The threads of a text, one below the other, with drafts marked."""
    terminal = sys.stdout.isatty()
    width = max(len(lane.name) for lane in lanes) + 2
    for lane in lanes:
        text, open_bracket = marked(lane.spans, terminal)
        lines = (text + "]" * open_bracket).split("\n")
        click.echo(lane.name.ljust(width) + f"\n{' ' * width}".join(lines))


def show_statistics(completion: Completion) -> None:
    """What a text cost, for people."""
    s = completion.statistics
    threads = f"{s.threads} threads, at most {s.peak_threads} at a time, " if s.threads > 1 else ""
    steps = s.steps + s.prompt_steps
    lines = [
        f"{s.tokens} tokens in {s.steps} steps ({s.tokens_per_step:.2f} a step), ended by {completion.ending}",
        f"{threads}at most {s.peak_slots} slots, {s.rows} rows",
        f"drafts accepted: {_drafts(s)}",
        f"{s.tokens_per_second:.1f} tokens/s, {s.first_token_seconds:.3f} s to the first token",
        f"{s.engine_seconds:.3f} s in the engine, {s.outside_seconds:.3f} s outside it "
        f"({s.outside_seconds / max(1, steps) * 1e3:.3f} ms a step), {s.waiting_seconds:.3f} s waiting",
    ]
    if completion.seed is not None:
        lines.append(f"seed {completion.seed}: the same one writes the same text again")
    click.echo("\n".join(lines), err=True)


def as_dict(completion: Completion) -> dict[str, Any]:
    """A completion for machines; README.md says what is in it."""
    statistics = asdict(completion.statistics)
    for rate in ("tokens_per_step", "tokens_per_second"):
        statistics[rate] = getattr(completion.statistics, rate)
    return {
        "text": completion.text,
        "ending": completion.ending,
        "tokens": completion.tokens,
        "prompt_tokens": completion.prompt_tokens,
        "logprobs": [asdict(one) for one in completion.logprobs],
        "threads": [asdict(thread) for thread in completion.threads],
        "seed": completion.seed,
        "statistics": statistics,
    }


def _drafts(s: Statistics) -> str:
    if not any(s.drafted_by_depth):
        return "none, nothing was drafted"
    depths = zip(s.accepted_by_depth, s.drafted_by_depth, strict=True)
    names = {"mask": "from mask slots", "lookup": "looked up", "both": "from both"}
    sources = (
        f"{s.accepted_by_source.get(source, 0)} of {fed} {names[source]}" for source, fed in s.drafted_by_source.items()
    )
    return f"{', '.join(sources)}; by depth {', '.join(f'{got}/{fed}' for got, fed in depths)}"
