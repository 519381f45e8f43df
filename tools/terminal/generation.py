"""A generation on the terminal: the text of each thread with accepted draft tokens marked, statistics, and both as JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import click

from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.decode.sources import named_source
from spaceport.runtime.sampling.logprobs import TokenLogprob
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.scheduling.stream import Stream
from spaceport.runtime.text.transcript import Path, Piece

_COLOURS: Mapping[str | None, str] = {
    **dict.fromkeys((None, "mask", "head"), "green"),
    **dict.fromkeys(("lookup", "phrase"), "cyan"),
}
_OTHER_COLOUR = "magenta"  # of several sources, and of others


class Span(NamedTuple):
    """A part of a thread's text."""

    text: str
    drafted: bool  # an accepted draft token; False: the model's own token
    source: str | None = None  # what proposed it


@dataclass
class _ThreadText:
    """The text of one thread so far, with its child threads at the positions where it forks."""

    path: Path
    parts: list[Span | _ThreadText] = field(default_factory=list)
    children: int = 0

    def spans(self) -> Iterator[Span]:
        """Its text and that of its child threads in reading order; do not ask for more than was added."""
        for part in self.parts:  # grows while it is read
            if isinstance(part, _ThreadText):
                yield from part.spans()
            else:
                yield part


class MarkedText:
    """The text of a generation in reading order, with what proposed each part, from the pieces of its stream."""

    def __init__(self, fork: int | None) -> None:
        root = _ThreadText(())
        self._fork = fork  # id of the [Fork] token
        self._threads: dict[Path, _ThreadText] = {(): root}
        self._order: Iterator[Span] = root.spans()

    def add(self, piece: Piece) -> list[Span]:
        """Add a piece; the spans that it appends to the text in reading order."""
        thread = self._threads[piece.thread]
        if piece.text:
            thread.parts.append(Span(piece.text, piece.drafted, piece.source))
        if piece.token == self._fork:
            child = _ThreadText((*thread.path, thread.children))
            thread.children += 1
            thread.parts.append(child)
            self._threads[child.path] = child
        return list(self._read(piece.reading))

    def _read(self, reading: str) -> Iterator[Span]:
        while reading:
            text, drafted, source = next(self._order, Span(reading, False))
            if not text.startswith(reading[: len(text)]):
                # When all threads end at once, text is released before the pieces that it belongs to.
                self._order, text, drafted, source = iter(()), reading, False, None
            yield Span(text[: len(reading)], drafted, source)
            reading = reading[len(text) :]


def marked(spans: Iterable[Span], terminal: bool, open_bracket: bool = False) -> tuple[str, bool]:
    """Spans as text, drafted ones underlined on a terminal, in the colour of their source, and in [brackets] elsewhere; whether a bracket is still open."""
    found = []
    for text, drafted, source in spans:
        if terminal:
            colour = None if os.environ.get("NO_COLOR") else _COLOURS.get(source, _OTHER_COLOUR)
            found.append(click.style(text, fg=colour, underline=True) if drafted else text)
            continue
        if drafted != open_bracket:
            found.append("[" if drafted else "]")
            open_bracket = drafted
        found.append(text)
    return "".join(found), open_bracket


def show(stream: Stream, fork: int | None, drafts: bool) -> None:
    """Print the output in reading order while it is generated, with accepted draft tokens marked if `drafts`."""
    found, terminal, open_bracket = MarkedText(fork), sys.stdout.isatty(), False
    for piece in stream:
        text = piece.reading
        if drafts:
            text, open_bracket = marked(found.add(piece), terminal, open_bracket)
        if text:
            click.echo(text, nl=False)
            sys.stdout.flush()
    click.echo("]" if open_bracket else "")


def show_statistics(completion: Completion) -> None:
    """Print the statistics of a completion on stderr."""
    s = completion.statistics
    threads = f"{s.threads} threads (at most {s.peak_threads} at once), " if s.threads > 1 else ""
    steps = s.steps + s.prompt_steps
    limited = sorted(s.drafts_limited.items(), key=lambda item: -item[1])  # reasons, the most frequent first
    reasons = ", ".join(f"{reason.replace('_', ' ')} {count}" for reason, count in limited)
    lines = [
        f"{s.tokens} tokens in {s.steps} steps ({s.tokens_per_step:.2f} tokens per step), ending: {completion.ending}",
        f"{threads}peak {s.peak_slots} KV slots, {s.rows} rows",
        f"draft tokens: {_drafts(s)}",
        *([f"drafts limited: {reasons}"] if reasons else []),
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
