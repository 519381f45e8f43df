"""Trace: an observer that records what each step of a request does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from tokenizers import Tokenizer

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.accept import Verdict
from spaceport.runtime.decode.plan import NO_PARENT, Part, Plan
from spaceport.runtime.decode.request import Request, VerifiedStep
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.text.tokenizer import TextStream, context_of
from spaceport.runtime.trace.record import Record, RowKind, StepRecord, ThreadRecord, ThreadRows


class SeenStep(NamedTuple):
    """What is stored of a step: only what is gone or has changed when the request is finished."""

    plan: Plan
    verdicts: list[Verdict]
    queue: tuple[Thread, ...]
    held: int
    engine_seconds: float
    outside_seconds: float  # of the steps before


@dataclass
class Trace:
    """Records every step of one request; `record` returns it as data, `as_dict` as JSON data."""

    needs_logits: ClassVar = False

    _seen: list[SeenStep] = field(default_factory=list)
    _request: Request | None = None

    def on_step(self, verified: VerifiedStep) -> None:
        """Store a step."""
        if self._request is not verified.request:
            fed = verified.request.statistics.cached_tokens  # before the first step
            first = int(verified.plan.parts[0].positions[0]) == fed
            if self._request is not None or not first:
                raise ValueError(
                    "a Trace records one request from its first step on: create a new one for each request"
                )
            self._request = verified.request
        self._seen.append(
            SeenStep(
                verified.plan,
                verified.verdicts,
                verified.queued,
                verified.held,
                verified.engine_seconds,
                verified.outside_seconds,
            )
        )

    @property
    def request(self) -> Request | None:
        """The request whose steps it stores; None before the first one."""
        return self._request

    def settled(self, begin: int) -> list[tuple[SeenStep, float]]:
        """The steps from an index on whose tokens are known, each with the seconds outside the engine after it.

        While the request runs, its last step is not known yet. May be called from another OS thread than that of the steps.
        """
        if self._request is None:
            return []
        live, seen = bool(self._request.live), self._seen[begin:]
        spent = [step.outside_seconds for step in seen]
        if begin == 0 and spent:
            spent[0] = 0.0
        ends = spent[1:] if live else [*spent[1:], self._request.statistics.outside_seconds]
        return [(step, after - before) for step, before, after in zip(seen, spent, ends, strict=False)]

    def record(self, tokenizer: Tokenizer | None = None) -> Record:
        """The record of all steps so far; with a tokenizer, token ids have their text too."""
        if self._request is None:
            return Record(TokenIds(), (), "", (), ())
        return _RecordBuilder(self._request, self._seen, tokenizer).record()

    def as_dict(self, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
        """The record as JSON data."""
        return self.record(tokenizer).as_dict()


class _RecordBuilder:
    """Builds a record; the tokens of a thread only ever grow, so they show what each step generated."""

    def __init__(self, request: Request, seen: Sequence[SeenStep], tokenizer: Tokenizer | None) -> None:
        self._request, self._seen, self._tokenizer = request, seen, tokenizer
        self._index = {thread.path: index for index, thread in enumerate(request.threads)}
        self._pieces = [
            [] if tokenizer is None else _pieces(tokenizer, thread, request.config.tokens.fork)
            for thread in request.threads
        ]

    def record(self) -> Record:
        request, root = self._request, self._request.threads[0]
        prompt = tuple(root.tokens[: root.start])
        steps = tuple(self._steps())
        return Record(
            tokens=request.config.tokens,
            prompt=prompt,
            prompt_text=""
            if self._tokenizer is None
            else str(self._tokenizer.decode(list(prompt), skip_special_tokens=False)),
            threads=tuple(
                ThreadRecord(thread.path, thread.fork, thread.start, thread.ending) for thread in request.threads
            ),
            steps=steps,
            texts=self._texts(steps),
            waiting_seconds=request.statistics.waiting_seconds,
        )

    def _steps(self) -> Iterator[StepRecord]:
        rows = [
            tuple(
                rows_of(part, verdict, self._index[part.thread.path], self._pieces)
                for part, verdict in zip(seen.plan.parts, seen.verdicts, strict=True)
            )
            for seen in self._seen
        ]
        queued = [tuple(self._index[thread.path] for thread in seen.queue) for seen in self._seen]
        started = [started_by(of_step, number, self._request.threads) for number, of_step in enumerate(rows)]
        last = [0] * len(self._request.threads)  # last step that mentions each thread
        for number, of_step in enumerate(rows):
            for thread in (*(one.thread for one in of_step), *queued[number], *started[number]):
                last[thread] = number
        engine, outside = self._seconds()
        for number, seen in enumerate(self._seen):
            ended = tuple(
                index
                for index, thread in enumerate(self._request.threads)
                if thread.ending is not None and last[index] == number
            )
            yield StepRecord(
                rows[number], queued[number], started[number], ended, seen.held, engine[number], outside[number]
            )

    def _seconds(self) -> tuple[list[float], list[float]]:
        """Seconds of each step in the engine, and outside of it."""
        outside = [*(seen.outside_seconds for seen in self._seen), self._request.statistics.outside_seconds]
        outside[0] = 0.0
        return [seen.engine_seconds for seen in self._seen], [after - before for before, after in pairwise(outside)]

    def _texts(self, steps: Sequence[StepRecord]) -> dict[int, str]:
        if self._tokenizer is None:
            return {}
        used = {token for step in steps for rows in step.rows for token in (*rows.tokens, *rows.chosen)}
        return {token: str(self._tokenizer.decode([token], skip_special_tokens=False)) for token in sorted(used)}


def rows_of(part: Part, verdict: Verdict, index: int, pieces: Sequence[Sequence[str]]) -> ThreadRows:
    """The rows of a thread in a step; `index` is that of the thread, `pieces` the texts that the tokens of each one add."""
    layout, thread = part.layout, part.thread
    kinds: list[RowKind] = ["known" if depth < 0 else "mask" for depth in layout.mask_depths.tolist()]
    sources = dict(zip(layout.nodes[1:], part.draft.sources, strict=True))
    for row in sources:
        kinds[row] = "candidate"
    position = int(part.positions[layout.known - 1]) + 1
    generated = max(0, min(len(verdict.tokens), len(thread.tokens) - position))
    own = position - thread.start
    return ThreadRows(
        thread=index,
        anchor=part.anchor,
        tokens=tuple(part.tokens.tolist()),
        parents=tuple(None if parent == NO_PARENT else parent for parent in layout.parents.tolist()),
        positions=tuple(part.positions.tolist()),
        kinds=tuple(kinds),
        sources=tuple(sources.get(row) for row in range(layout.rows)),
        retained=tuple(row in verdict.retained for row in range(layout.rows)),
        chosen=verdict.tokens,
        generated=generated,
        pieces=tuple(pieces[index][own : own + generated]),
        limited=part.draft.limited,
    )


def started_by(rows: Sequence[ThreadRows], number: int, threads: Sequence[Thread]) -> tuple[int, ...]:
    """The threads whose [Fork] these rows of a step generated; the root thread starts in the first step."""
    ranges = {threads[one.thread].path: range(one.position, one.position + one.generated) for one in rows}
    return tuple(
        index
        for index, thread in enumerate(threads)
        if (thread.fork in ranges.get(thread.path[:-1], ()) if thread.path else number == 0)
    )


def _pieces(tokenizer: Tokenizer, thread: Thread, fork: int | None) -> list[str]:
    """The text that each token of a thread adds; the token that completes a character adds it."""
    found: list[str] = []
    stream = TextStream(tokenizer, context=thread_context(tokenizer, thread, thread.fork))
    for position, token in enumerate(thread.generated, thread.start):
        if token == fork:  # text after a [Fork] is read after another thread's text
            _finish(stream, found)
            found.append("")
            stream = TextStream(tokenizer, context=thread_context(tokenizer, thread, position))
        else:
            stream.push(token)
            found.append(stream.fresh)
    _finish(stream, found)
    return found


def _finish(stream: TextStream, found: list[str]) -> None:
    stream.finish()
    if stream.fresh:
        found[-1] += stream.fresh


def thread_context(tokenizer: Tokenizer, thread: Thread, fork: int | None) -> tuple[int, ...]:
    """The tokens before a text of a thread: up to a [Fork], or none."""
    return () if fork is None else context_of(tokenizer, thread.tokens[: fork + 1])


@dataclass
class _ThreadPieces:
    """The text that each token of a thread added so far."""

    thread: Thread
    stream: TextStream
    pieces: list[str] = field(default_factory=list)


@dataclass
class GrowingTrace:
    """Reads the new steps of a trace while its request runs; `Trace.record` has all of them at the end.

    A step is known once the next one began. Which threads it ended is not known yet: `ended` is empty. Bytes of an
    incomplete character at the end of a thread are left out.
    """

    trace: Trace
    tokenizer: Tokenizer
    _read: int = 0  # steps
    _threads: list[_ThreadPieces] = field(default_factory=list)
    _named: set[int] = field(default_factory=set)  # tokens whose texts were reported

    def fresh(self) -> dict[str, Any] | None:
        """The new steps as JSON data, with the threads that they started and the texts of new tokens; None without any."""
        request, seen = self.trace.request, self.trace.settled(self._read)
        if request is None or not seen:
            return None
        known = len(self._threads)
        for thread in request.threads[known:]:
            self._threads.append(_ThreadPieces(thread, self._stream(thread, thread.fork)))
        index = {each.thread.path: number for number, each in enumerate(self._threads)}
        steps = [self._step(*each, self._read + number, index) for number, each in enumerate(seen)]
        self._read += len(steps)
        return {
            "steps": [step.as_dict() for step in steps],
            "threads": [
                ThreadRecord(each.thread.path, each.thread.fork, each.thread.start, None).as_dict()
                for each in self._threads[known:]
            ],
            "texts": self._texts(steps),
        }

    def _step(self, seen: SeenStep, outside: float, number: int, index: dict[tuple[int, ...], int]) -> StepRecord:
        for part, verdict in zip(seen.plan.parts, seen.verdicts, strict=True):
            self._push(self._threads[index[part.thread.path]], len(verdict.tokens))
        pieces = [each.pieces for each in self._threads]
        rows = tuple(
            rows_of(part, verdict, index[part.thread.path], pieces)
            for part, verdict in zip(seen.plan.parts, seen.verdicts, strict=True)
        )
        started = started_by(rows, number, [each.thread for each in self._threads])
        queued = tuple(index[thread.path] for thread in seen.queue)
        return StepRecord(rows, queued, started, (), seen.held, seen.engine_seconds, outside)

    def _push(self, each: _ThreadPieces, most: int) -> None:
        """Add the texts of at most this many new tokens of a thread."""
        thread, begin = each.thread, each.thread.start + len(each.pieces)
        for position, token in enumerate(thread.tokens[begin : begin + most], begin):
            if token == self._fork:  # text after a [Fork] is read after another thread's text
                each.pieces.append("")
                each.stream = self._stream(thread, position)
            else:
                each.stream.push(token)
                each.pieces.append(each.stream.fresh)

    @property
    def _fork(self) -> int | None:
        return None if self.trace.request is None else self.trace.request.config.tokens.fork

    def _stream(self, thread: Thread, fork: int | None) -> TextStream:
        return TextStream(self.tokenizer, context=thread_context(self.tokenizer, thread, fork))

    def _texts(self, steps: list[StepRecord]) -> dict[str, str]:
        used = {token for step in steps for rows in step.rows for token in (*rows.tokens, *rows.chosen)} - self._named
        self._named |= used
        return {str(token): self.tokenizer.decode([token], skip_special_tokens=False) for token in sorted(used)}
