"""Growing trace: the steps of a running request as records, soon after they happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.text.tokenizer import TextStream
from spaceport.runtime.trace.record import StepRecord, ThreadRecord
from spaceport.runtime.trace.trace import SeenStep, Trace, rows_of, started_by, thread_context


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
