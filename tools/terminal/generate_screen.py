"""Generate screen: streamed output, statistics, and both as JSON."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import click

from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.decode.sources import named_source
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.scheduling.stream import Stream
from spaceport.tools.terminal.lanes import Lanes, marked


def show(stream: Stream, lanes: Lanes, drafts: bool) -> None:
    """Print the output in reading order while it is generated."""
    terminal, open_bracket = sys.stdout.isatty(), False
    for piece in stream:
        text = piece.reading
        if drafts:
            text, open_bracket = marked(lanes.add(piece), terminal, open_bracket)
        if text:
            click.echo(text, nl=False)
            sys.stdout.flush()
    click.echo("]" if open_bracket else "")


def show_live(stream: Stream, lanes: Lanes, drafts: bool) -> None:
    """Show all threads while they grow, then the output in reading order."""
    from spaceport.tools.terminal.live import watch

    spans = watch(stream, lanes)
    text = marked(spans, True)[0] if drafts else "".join(span.text for span in spans)
    click.echo(f"\n{text}" if len(lanes) > 1 else text)


def show_lanes(lanes: Lanes) -> None:
    """Print the threads of a generation one below the other, with accepted draft tokens marked."""
    terminal = sys.stdout.isatty()
    width = max(len(lane.name) for lane in lanes) + 2
    for lane in lanes:
        text, open_bracket = marked(lane.spans, terminal)
        lines = (text + "]" * open_bracket).split("\n")
        click.echo(lane.name.ljust(width) + f"\n{' ' * width}".join(lines))


def show_statistics(completion: Completion) -> None:
    """Print the statistics of a completion on stderr."""
    s = completion.statistics
    threads = f"{s.threads} threads (at most {s.peak_threads} at once), " if s.threads > 1 else ""
    steps = s.steps + s.prompt_steps
    lines = [
        f"{s.tokens} tokens in {s.steps} steps ({s.tokens_per_step:.2f} tokens per step), ending: {completion.ending}",
        f"{threads}peak {s.peak_slots} KV slots, {s.rows} rows",
        f"draft tokens: {_drafts(s)}",
        *([f"drafts limited: {_reasons(s)}"] if s.drafts_limited else []),
        f"{s.tokens_per_second:.1f} tokens/s, {s.first_token_seconds:.3f} s to first token",
        f"{s.engine_seconds:.3f} s in the engine, {s.outside_seconds:.3f} s outside "
        f"({s.outside_seconds / max(1, steps) * 1e3:.3f} ms per step), {s.waiting_seconds:.3f} s queued",
    ]
    if completion.seed is not None:
        lines.append(f"seed {completion.seed}: repeat with --seed {completion.seed} for the same output")
    click.echo("\n".join(lines), err=True)


def as_dict(completion: Completion) -> dict[str, Any]:
    """A completion as JSON data; README.md lists the entries."""
    statistics = asdict(completion.statistics)
    for rate in ("tokens_per_step", "tokens_per_second", "acceptance_rate", "mean_acceptance_length"):
        statistics[rate] = getattr(completion.statistics, rate)
    return {
        "text": completion.text,
        "ending": completion.ending,
        "tokens": completion.tokens,
        "prompt_tokens": completion.prompt_tokens,
        "logprobs": [_logprob(one) for one in completion.logprobs],
        "threads": [
            asdict(thread) | {"logprobs": [_logprob(one) for one in thread.logprobs]} for thread in completion.threads
        ],
        "seed": completion.seed,
        "statistics": statistics,
    }


def _logprob(one: TokenLogprob) -> dict[str, Any]:
    """A log probability as JSON data."""
    return _spelled(one) | {"top": [_spelled(each) for each in one.top]}


def _spelled(one: TokenLogprob) -> dict[str, Any]:
    """A token and its log probability; the bytes as a list of integers, which JSON can hold."""
    return {"token": one.token, "logprob": one.logprob, "text": one.text, "bytes": list(one.bytes)}


def _drafts(s: Statistics) -> str:
    drafted, accepted = sum(s.drafted_by_depth), sum(s.accepted_by_depth)
    if not drafted:
        return "none"
    rates = f"acceptance rate {100 * s.acceptance_rate:.1f}%"
    if s.mean_acceptance_length is not None:
        rates += f", mean acceptance length {s.mean_acceptance_length:.2f}"
    sources = ", ".join(
        f"{named_source(source)} {s.accepted_by_source.get(source, 0)}/{count}"
        for source, count in s.drafted_by_source.items()
    )
    depths = ", ".join(f"{a}/{d}" for a, d in zip(s.accepted_by_depth, s.drafted_by_depth, strict=True))
    return f"{accepted} of {drafted} accepted ({rates})\n  by source: {sources}; by depth: {depths}"


def _reasons(s: Statistics) -> str:
    """The reasons with their numbers of steps, the most frequent first."""
    counts = sorted(s.drafts_limited.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason.replace('_', ' ')} {count}" for reason, count in counts)
