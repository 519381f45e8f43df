"""What every step of a request did: recorded while it runs, as data that can be stored and shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal

from tokenizers import Tokenizer

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.draft import Reason
from spaceport.runtime.decode.plan import NO_PARENT, Part, Verdict
from spaceport.runtime.decode.sequence import Ending, TokenSequence
from spaceport.runtime.decode.sequence_group import RequestStep, SequenceGroup
from spaceport.runtime.text.tokenizer import TextStream, context_of

SCHEMA = 3

RowKind = Literal["known", "candidate", "mask"]


@dataclass(frozen=True)
class ThreadRows:
    """The rows of one thread in a step, and which tokens they generated."""

    thread: int  # index of the thread in the record
    anchor: int | None  # row of the step with another thread's [Fork] that is the parent of the first row
    tokens: tuple[int, ...]
    # index of each row's parent among these rows; None: the thread's last token in the KV cache
    parents: tuple[int | None, ...]
    positions: tuple[int, ...]
    kinds: tuple[RowKind, ...]
    sources: tuple[str | None, ...]  # of each candidate, such as "mask+lookup"; None for other rows
    retained: tuple[bool, ...]  # whether the row's KV slot was retained
    chosen: tuple[int, ...]  # accepted candidates, then the model's own next token; empty in a prefill chunk
    generated: int  # number of chosen tokens that belong to the completion: those before its end
    pieces: tuple[str, ...] = ()  # text that each generated token added; empty without a tokenizer
    limited: Reason | None = None  # why the draft is narrower than its limits allow; None: it is not

    @property
    def text(self) -> tuple[int, ...]:
        """The tokens that the thread generated."""
        return self.chosen[: self.generated]

    @property
    def accepted(self) -> int:
        """Number of generated tokens that were accepted candidates."""
        return min(self.generated, max(0, len(self.chosen) - 1))

    @cached_property
    def known(self) -> int:
        """Number of rows of known tokens; they come first."""
        return self.kinds.count("known")

    @cached_property
    def candidates(self) -> tuple[int, ...]:
        """The rows of candidates; the retained ones are in the order of the text."""
        return tuple(row for row, kind in enumerate(self.kinds) if kind == "candidate")

    @property
    def position(self) -> int:
        """Position of the first token that the step can generate."""
        return self.positions[self.known - 1] + 1


@dataclass(frozen=True)
class StepRecord:
    """One call of the engine, as far as it concerned the request."""

    rows: tuple[ThreadRows, ...]  # of each thread that took part
    queued: tuple[int, ...]  # threads that waited, beyond `max_threads`
    started: tuple[int, ...]  # threads whose [Fork] it generated; the root thread starts in the first step
    ended: tuple[int, ...]  # threads that generated nothing after it
    kv_slots: int  # KV slots in use, those of its rows included
    engine_seconds: float
    outside_seconds: float


@dataclass(frozen=True)
class ThreadRecord:
    """A thread as it was when the record was made."""

    path: tuple[int, ...]
    fork: int | None  # position of the [Fork] that started it; None for the root thread
    start: int  # position of its first own token
    ending: Ending | None  # None: it had not ended


@dataclass(frozen=True)
class TraceRecord:
    """What every step of a generation did."""

    tokens: TokenIds
    prompt: tuple[int, ...]
    prompt_text: str  # empty without a tokenizer
    threads: tuple[ThreadRecord, ...]  # the root thread, then the others in the order of their start
    steps: tuple[StepRecord, ...]
    # token id to its text; empty without a tokenizer
    texts: dict[int, str] = field(default_factory=dict)
    waiting_seconds: float = 0.0
    schema: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON data."""
        return asdict(self) | {"texts": {str(token): text for token, text in self.texts.items()}}

    @cached_property
    def generated(self) -> tuple[tuple[int, ...], ...]:
        generated: list[list[int]] = [[] for _ in self.threads]
        for step in self.steps:
            for rows in step.rows:
                generated[rows.thread] += rows.text
        return tuple(map(tuple, generated))


@dataclass
class Trace:
    """Records every step of one request; `record` returns it as data, `as_dict` as JSON data."""

    needs_logits: ClassVar = False

    # of the request whose steps it records; None before the first one
    sequences: SequenceGroup | None = field(default=None, init=False)
    _steps: list[RequestStep] = field(default_factory=list, init=False)

    def on_step(self, step: RequestStep) -> None:
        """Record a step."""
        if self.sequences is not step.sequences:
            fed = step.sequences.statistics.cached_tokens  # before the first step
            first = int(step.parts[0].positions[0]) == fed
            if self.sequences is not None or not first:
                raise ValueError(
                    "a Trace records one request from its first step on: create a new one for each request"
                )
            self.sequences = step.sequences
        self._steps.append(step)

    def steps(self, begin: int = 0) -> list[tuple[RequestStep, float]]:
        """The steps from an index on, each with the seconds that the request spent outside the engine after it.

        May be called from another OS thread than that of the steps.
        """
        if self.sequences is None:
            return []
        steps = self._steps[begin:]
        spent = [*(step.outside_seconds for step in steps), self.sequences.statistics.outside_seconds]
        if begin == 0:
            spent[0] = 0.0
        return [(step, after - before) for step, (before, after) in zip(steps, pairwise(spent), strict=True)]

    def record(self, tokenizer: Tokenizer | None = None) -> TraceRecord:
        """The record of all steps so far; with a tokenizer, token ids have their text too."""
        return TraceReader(self, tokenizer).record()

    def as_dict(self, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
        """The record as JSON data."""
        return self.record(tokenizer).as_dict()


class TraceReader:
    """Turns the steps of a trace into records, once as a whole, or the new ones again and again while its request runs.

    The tokens of a thread only ever grow, so they show what each step generated.
    """

    def __init__(self, trace: Trace, tokenizer: Tokenizer | None) -> None:
        self._trace = trace
        self._tokenizer = tokenizer
        self._texts: list[_ThreadTexts] = []  # of the threads so far
        self._index: dict[tuple[int, ...], int] = {}  # of each thread, by its path
        self._read = 0  # number of steps that were read
        self._named: set[int] = set()  # tokens whose texts were reported

    def record(self) -> TraceRecord:
        sequences, tokenizer = self._trace.sequences, self._tokenizer
        if sequences is None:
            return TraceRecord(TokenIds(), (), "", (), ())
        self._add_threads(sequences)
        for texts in self._texts:
            texts.follow(len(texts.thread.generated))
            texts.finish()
        steps = [self._step(*step) for step in self._trace.steps()]
        prompt = tuple(sequences.threads[0].tokens[: sequences.threads[0].start])
        return TraceRecord(
            tokens=sequences.tokens,
            prompt=prompt,
            prompt_text=str(tokenizer.decode(list(prompt), skip_special_tokens=False)) if tokenizer else "",
            threads=tuple(
                ThreadRecord(thread.path, thread.fork, thread.start, thread.ending) for thread in sequences.threads
            ),
            steps=tuple(_with_ends(steps, sequences.threads)),
            texts=self._texts_of(_used_tokens(steps)),
            waiting_seconds=sequences.statistics.waiting_seconds,
        )

    def fresh(self) -> dict[str, Any] | None:
        """The new steps as JSON data, with the threads that they started and the texts of new tokens; None without any.

        A step is known once the next one began. Which threads it ended is not known yet: `ended` is empty. Bytes of an
        incomplete character at the end of a thread are left out.
        """
        sequences = self._trace.sequences
        if sequences is None:
            return None
        running = bool(sequences.live)
        new_steps = self._trace.steps(self._read)
        if running:
            new_steps = new_steps[:-1]
        if not new_steps:
            return None
        started = self._add_threads(sequences)
        steps = []
        for step, outside_seconds in new_steps:
            for part, verdict in zip(step.parts, step.verdicts, strict=True):
                self._texts[self._index[part.thread.path]].follow(len(verdict.tokens))
            steps.append(self._step(step, outside_seconds))
        new_tokens = _used_tokens(steps) - self._named
        self._named |= new_tokens
        return {
            "steps": [asdict(step) for step in steps],
            "threads": [asdict(ThreadRecord(thread.path, thread.fork, thread.start, None)) for thread in started],
            "texts": {str(token): text for token, text in self._texts_of(new_tokens).items()},
        }

    def _add_threads(self, sequences: SequenceGroup) -> list[TokenSequence]:
        """The threads that were started since the last call."""
        started = sequences.threads[len(self._texts) :]
        for thread in started:
            self._index[thread.path] = len(self._texts)
            self._texts.append(_ThreadTexts(thread, self._tokenizer, sequences.tokens.fork))
        return started

    def _texts_of(self, tokens: Iterable[int]) -> dict[int, str]:
        if self._tokenizer is None:
            return {}
        return {token: str(self._tokenizer.decode([token], skip_special_tokens=False)) for token in sorted(tokens)}

    def _step(self, step: RequestStep, outside_seconds: float) -> StepRecord:
        """The record of the next step, without the threads that it ended."""
        rows = tuple(self._rows(part, verdict) for part, verdict in zip(step.parts, step.verdicts, strict=True))
        queued = tuple(self._index[thread.path] for thread in step.queued)
        started = self._started_by(rows)
        self._read += 1
        return StepRecord(rows, queued, started, (), step.held, step.engine_seconds, outside_seconds)

    def _rows(self, part: Part, verdict: Verdict) -> ThreadRows:
        layout, thread = part.layout, part.thread
        index = self._index[thread.path]
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
            pieces=tuple(self._texts[index].pieces[own : own + generated]),
            limited=part.draft.limited,
        )

    def _started_by(self, rows: Sequence[ThreadRows]) -> tuple[int, ...]:
        """The threads whose [Fork] these rows of a step generated; the root thread starts in the first step."""
        generated = {
            self._texts[own.thread].thread.path: range(own.position, own.position + own.generated) for own in rows
        }
        return tuple(
            index
            for path, index in self._index.items()
            if (self._texts[index].thread.fork in generated.get(path[:-1], ()) if path else self._read == 0)
        )


class _ThreadTexts:
    """The text that each token of a thread adds; the token that completes a character adds it."""

    def __init__(self, thread: TokenSequence, tokenizer: Tokenizer | None, fork: int | None) -> None:
        self.thread = thread
        self.pieces: list[str] = []  # stays empty without a tokenizer
        self._tokenizer = tokenizer
        self._fork = fork  # id of the [Fork] token
        self._stream = self._stream_behind(thread.fork)

    def follow(self, most: int) -> None:
        """Add the texts of at most this many further tokens."""
        begin = self.thread.start + len(self.pieces)
        for position, token in enumerate(self.thread.tokens[begin : begin + most], begin):
            if self._stream is None:
                return
            if token == self._fork:  # text after a [Fork] is read after another thread's text
                self.finish()
                self.pieces.append("")
                self._stream = self._stream_behind(position)
            else:
                self.pieces.append(self._stream.push(token))

    def finish(self) -> None:
        """Add the bytes of an incomplete character to the last piece."""
        if self._stream is not None and (rest := self._stream.finish()):
            self.pieces[-1] += rest

    def _stream_behind(self, fork: int | None) -> TextStream | None:
        """A stream for the text after the [Fork] at this position, or for that of the root thread."""
        if self._tokenizer is None:
            return None
        context = () if fork is None else context_of(self._tokenizer, self.thread.tokens[: fork + 1])
        return TextStream(self._tokenizer, context=context)


def _with_ends(steps: Sequence[StepRecord], threads: Sequence[TokenSequence]) -> list[StepRecord]:
    """The steps with the threads that each ended: those that no later step mentions."""
    last = [0] * len(threads)
    for number, step in enumerate(steps):
        for index in (*(rows.thread for rows in step.rows), *step.queued, *step.started):
            last[index] = number
    ends: list[list[int]] = [[] for _ in steps]
    for index, thread in enumerate(threads):
        if thread.ending is not None:
            ends[last[index]].append(index)
    return [replace(step, ended=tuple(ended)) for step, ended in zip(steps, ends, strict=True)]


def _used_tokens(steps: Iterable[StepRecord]) -> set[int]:
    return {token for step in steps for rows in step.rows for token in (*rows.tokens, *rows.chosen)}
