"""The text of a request's threads, as pieces and in reading order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tokenizers import Tokenizer

from spaceport.runtime.decode.sequence import Ending, Listener, TokenSequence
from spaceport.runtime.sampling.logprobs import Logprobs, TokenLogprob
from spaceport.runtime.text.tokenizer import StopSearch, TextStream, context_of

Path = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """What one token adds to a completion.

    - `text`: New text of the token's own thread; may be empty, since part of a character or of a possible stop string is
      held back.
    - `token`: Token id; None for a piece that only releases text that was held back.
    - `drafted`: Whether the token is an accepted draft token.
    - `thread`: Path of the thread; () is the root thread, (0, 1) the second child of its first child.
    - `reading`: Text that can now be appended to the text shown so far, if threads are shown in reading order.
    - `source`: What proposed an accepted draft token: "mask" (mask slots), "head" (heads), "lookup" (prompt lookup) or
      "phrase" (phrases), and "mask+lookup" if both did; None for other tokens.
    - `logprob`: Log probability of the token; None unless `Decoding.logprobs` was set.
    """

    text: str
    token: int | None
    drafted: bool
    thread: Path = ()
    reading: str = ""
    logprob: TokenLogprob | None = None
    source: str | None = None


@dataclass(frozen=True)
class ThreadText:
    """The finished text of one thread.

    - `path`: Path of the thread; () is the root thread, (0, 1) the second child of its first child.
    - `fork`: Index of the `[Fork]` token in the parent's `tokens` that started this thread; None for the root thread.
    - `text`: Text of this thread alone.
    - `tokens`: Token ids of this thread alone, each `[Fork]` included, the end token not.
    - `ending`: Why the thread ended.
    - `logprobs`: Log probability of each of `tokens`; empty unless `Decoding.logprobs` was set.
    """

    path: Path
    fork: int | None
    text: str
    tokens: tuple[int, ...]
    ending: Ending
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass
class Segment:
    """Text of a thread between two forks; `push` and `finish` return what of it is known to be before a stop string."""

    stream: TextStream
    search: StopSearch
    start: int = 0  # number of the thread's tokens before it
    tokens: int = 0
    parts: list[str] = field(default_factory=list)  # text of each token, stop strings included, then the rest

    @property
    def end(self) -> int:
        """One more than the index of its last token in the thread."""
        return self.start + self.tokens

    def push(self, token: int) -> str:
        """Text that a token releases; `search.stopped` is then whether it completed a stop string."""
        self.tokens += 1
        self.parts.append(self.stream.push(token))
        return self.search.push(self.parts[-1])

    def finish(self) -> str:
        """Text that is still held back, after the last token."""
        if self.search.stopped:
            return ""
        self.parts.append(self.stream.finish())
        return self.search.push(self.parts[-1]) + self.search.finish()


@dataclass
class _ThreadState:
    """Tokens of one thread so far, and its last segment."""

    path: Path
    segment: Segment
    parent: _ThreadState | None = None
    fork: int = -1  # index of the [Fork] among the parent's tokens
    tokens: list[int] = field(default_factory=list)
    ending: Ending | None = None


class Transcript(Listener):
    """The text of one request, whose threads generate in any order.

    In reading order, a child's whole text replaces the [Fork] that started it. The text ends before the first stop string
    in that order, independent of the speed of threads. A stop string between two forks of a thread is found with the
    token that completes it; one across a fork or the end of a thread is found once all text before it is known. So
    `Piece.text` may show text that turns out to be after a stop string; `Piece.reading` never does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: tuple[str, ...] = (),
        fork: int | None = None,
        logprobs: Logprobs | None = None,  # observer of the same request
        *,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._fork = fork
        self._logprobs = logprobs
        self._include_stop = include_stop
        self._skip_special = skip_special
        root = _ThreadState((), self._segment())
        self._states: dict[Path, _ThreadState] = {(): root}
        self._order = [(root, root.segment)]  # all segments in reading order
        self._next = (0, 0)  # index of the segment that is read next, and of its part
        self._search = StopSearch(stops, include_stop)  # in what is read
        self._shown: list[str] = []
        self._pieces: list[Piece] = []
        self._bound: tuple[float, ...] | None = None  # end of reading: threads after it are cut off
        # Index of the segment that completed the first stop string, and the number of its thread's tokens then.
        self._cut: tuple[int, int] | None = None

    @property
    def text(self) -> str:
        """The text in reading order so far."""
        return "".join(self._shown)

    def on_token(self, thread: TokenSequence, token: int, drafted: bool, source: str | None = None) -> bool:
        if self.is_cut_off(thread):
            return True
        state = self._states[thread.path]
        segment = state.segment
        state.tokens.append(token)
        text = segment.finish() if token == self._fork else segment.push(token)
        reading = self._read_after(state)
        if token == self._fork:
            # up to the [Fork]: when events are replayed, the thread may have more tokens already
            context = context_of(self._tokenizer, thread.tokens[: thread.start + len(state.tokens)])
            state.segment = self._segment(context, len(state.tokens))
            self._order.insert(self._index(segment) + 1, (state, state.segment))
        logprob = None if self._logprobs is None else self._logprobs.at(state.path, len(state.tokens) - 1)
        self._pieces.append(Piece(text, token, drafted, state.path, reading, logprob, source))
        return segment.search.stopped or self._search.stopped

    def on_fork(self, parent: TokenSequence, child: TokenSequence) -> None:
        state = self._states[parent.path]
        segment = self._segment(state.segment.stream.context)
        started = self._states[child.path] = _ThreadState(child.path, segment, state, len(state.tokens) - 1)
        self._order.insert(self._index(state.segment), (started, segment))

    def on_end(self, thread: TokenSequence) -> None:
        """Release the text that an ended thread held back."""
        state = self._states[thread.path]
        state.ending = thread.ending
        if self.is_cut_off(thread):
            return
        text = state.segment.finish()
        reading = self._read_after(state)
        if text or reading:
            self._lengthen(thread, text, reading)

    def is_cut_off(self, thread: TokenSequence) -> bool:
        """Whether all further text of a thread is after a stop string."""
        return self._bound is not None and _end(thread.path) > self._bound

    def take(self) -> list[Piece]:
        """The pieces since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def finished(self, with_logprobs: bool = True) -> tuple[ThreadText, ...]:
        """The text of each thread once all have ended, parents before their children.

        Text after the first stop string is left out: later threads are missing, and the others end with "stop" at the token
        that completed it, or at the [Fork] towards that token.
        """
        texts: dict[Path, str] = {}
        left = len(self.text)
        for state, segment in self._finished_segments():
            text = "".join(segment.parts)[:left]
            left -= len(text)
            texts[state.path] = texts.get(state.path, "") + text
        cuts = self._cuts()
        return tuple(self._thread_text(self._states[path], text, cuts, with_logprobs) for path, text in texts.items())

    def tokens(self) -> tuple[int, ...]:
        """The tokens of the finished text in reading order, without any [Fork]."""
        return tuple(token for state, part in self._finished_tokens() for token in state.tokens[part])

    def logprobs(self, threads: Sequence[ThreadText]) -> tuple[TokenLogprob, ...]:
        """The log probabilities of these tokens, as far as the finished threads have them."""
        of_threads = {thread.path: thread.logprobs for thread in threads}
        return tuple(logprob for state, part in self._finished_tokens() for logprob in of_threads[state.path][part])

    def _segment(self, context: tuple[int, ...] = (), start: int = 0) -> Segment:
        stream = TextStream(self._tokenizer, context, self._skip_special)
        return Segment(stream, StopSearch(self._stops, self._include_stop), start)

    def _index(self, segment: Segment) -> int:
        return next(index for index, (_, other) in enumerate(self._order) if other is segment)

    def _read_after(self, state: _ThreadState) -> str:
        """Text that can be read now, after the text of a thread has become longer."""
        if state.segment.search.stopped:
            self._bound = _end(state.path)
        released = []
        index, part = self._next
        while self._cut is None and index < len(self._order):
            state, segment = self._order[index]
            if part < len(segment.parts):
                released.append(self._search.push(segment.parts[part]))
                part += 1
                if self._search.stopped:
                    self._cut, self._bound = (index, segment.start + min(part, segment.tokens)), ()
            elif segment is not state.segment or state.ending is not None:
                index, part = index + 1, 0
            else:
                break
        if index == len(self._order):
            released.append(self._search.finish())
        self._next = index, part
        self._shown += released
        return "".join(released)

    def _lengthen(self, thread: TokenSequence, text: str, reading: str) -> None:
        """Add released text to the thread's last piece, or as a piece without a token."""
        for index in reversed(range(len(self._pieces))):
            piece = self._pieces[index]
            if piece.thread == thread.path:
                self._pieces[index] = replace(piece, text=piece.text + text, reading=piece.reading + reading)
                return
            if reading and piece.reading:
                break  # text that is read later must come later
        self._pieces.append(Piece(text, None, False, thread.path, reading))

    def _finished_segments(self) -> list[tuple[_ThreadState, Segment]]:
        """The segments of the finished text in reading order."""
        if self._cut is not None:
            return self._order[: self._cut[0] + 1]
        for state, _ in self._order:
            if state.ending is None:
                raise ValueError(f"thread {state.path} has not ended: there is no finished text")
        return self._order

    def _finished_tokens(self) -> Iterator[tuple[_ThreadState, slice]]:
        """The tokens of the finished text as slices of threads, in reading order, without any [Fork]."""
        cuts = self._cuts()
        for state, segment in self._finished_segments():
            yield state, slice(segment.start, min(segment.end, cuts.get(state.path, segment.end)))

    def _cuts(self) -> dict[Path, int]:
        """Number of remaining tokens of each thread that the first stop string cuts."""
        cuts: dict[Path, int] = {}
        if self._cut is not None:
            index, count = self._cut
            state, _ = self._order[index]
            cuts[state.path] = count
            while state.parent is not None:
                cuts[state.parent.path] = state.fork + 1
                state = state.parent
        return cuts

    def _thread_text(self, state: _ThreadState, text: str, cuts: Mapping[Path, int], with_logprobs: bool) -> ThreadText:
        tokens = state.tokens[: cuts.get(state.path)]
        reported = range(len(tokens)) if with_logprobs else ()
        logprobs = () if self._logprobs is None else (self._logprobs.at(state.path, index) for index in reported)
        ending = "stop" if state.path in cuts else state.ending
        assert ending is not None
        fork = None if state.parent is None else state.fork
        return ThreadText(state.path, fork, text, tuple(tokens), ending, tuple(logprobs))


def _end(path: Path) -> tuple[float, ...]:
    """Sort key of a thread's end in reading order: after all its children, before its parent and later siblings."""
    return (*path, math.inf)
