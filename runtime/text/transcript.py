"""Transcript: the text of a request's threads, as pieces and in reading order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from tokenizers import Tokenizer

from spaceport.runtime.decode.sequence import Ending, Thread
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
    - `source`: What proposed an accepted draft token: "mask" (mask slots), "head" (heads) or "lookup" (prompt lookup), and
      "mask+lookup" if both did; None for other tokens.
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
    parts: list[str] = field(default_factory=list)  # text of each token, stop strings included

    @property
    def end(self) -> int:
        """One more than the index of its last token in the thread."""
        return self.start + len(self.parts)

    def push(self, token: int) -> str:
        """Text that a token releases; `search.stopped` is then whether it completed a stop string."""
        self.parts.append(self.stream.push(token))
        return self.search.push(self.parts[-1])

    def finish(self) -> tuple[str, str]:
        """Text that is still held back after the last token, and how much longer the text of that token is."""
        if self.search.stopped:
            return "", ""
        rest = self.stream.finish()
        if rest:
            self.parts[-1] += rest
        return self.search.push(rest) + self.search.finish(), rest


@dataclass
class _ThreadState:
    """Text and tokens of one thread so far."""

    path: Path
    segments: list[Segment]
    parent: _ThreadState | None = None
    fork: int = -1  # index of the [Fork] among the parent's tokens
    tokens: list[int] = field(default_factory=list)
    # Child thread between two segments; None: it has not started.
    children: list[_ThreadState | None] = field(default_factory=list)
    read: int = 0  # number of segments that were read completely
    ending: Ending | None = None


class Transcript:
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
        self._root = _ThreadState((), [self._segment()])
        self._states: dict[Path, _ThreadState] = {(): self._root}
        self._front: _ThreadState | None = self._root  # the thread that is read next
        self._search = StopSearch(stops, include_stop)
        self._shown: list[str] = []
        self._pieces: list[Piece] = []
        self._bound: tuple[float, ...] | None = None  # end of reading: threads after it are cut off
        # The thread that completed the first stop string, and its number of tokens then.
        self._cut: tuple[_ThreadState, int] | None = None

    @property
    def text(self) -> str:
        """The text in reading order so far."""
        return "".join(self._shown)

    def on_token(self, thread: Thread, token: int, drafted: bool, source: str | None = None) -> bool:
        """Add a thread's next token; returns whether the thread ends with it."""
        if self.is_cut_off(thread):
            return True
        state = self._states[thread.path]
        segment = state.segments[-1]
        state.tokens.append(token)
        if token == self._fork:
            text, reading = self._close(state)
            self._split(state, thread)
        else:
            text = segment.push(token)
            reading = self._follow(state, segment.parts[-1])
        logprob = None if self._logprobs is None else self._logprobs.at(state.path, len(state.tokens) - 1)
        self._pieces.append(Piece(text, token, drafted, state.path, reading, logprob, source))
        return segment.search.stopped or self._search.stopped

    def on_fork(self, parent: Thread, child: Thread) -> None:
        """Add a child thread at the last token of its parent."""
        state = self._states[parent.path]
        segment = self._segment(state.segments[-1].stream.context)
        new = _ThreadState(child.path, [segment], state, len(state.tokens) - 1)
        self._states[child.path] = state.children[-1] = new
        if self._front is state:
            self._front = new

    def on_end(self, thread: Thread) -> None:
        """Release the text that an ended thread held back."""
        state = self._states[thread.path]
        state.ending = thread.ending
        if self.is_cut_off(thread):
            return
        text, reading = self._close(state)
        if state is self._front:
            reading += self._advance()
        if text or reading:
            self._lengthen(thread, text, reading)

    def is_cut_off(self, thread: Thread) -> bool:
        """Whether all further text of a thread is after a stop string."""
        return self._bound is not None and _end(thread.path) > self._bound

    def take(self) -> list[Piece]:
        """The pieces since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def finished(self) -> tuple[ThreadText, ...]:
        """The text of each thread once all have ended, parents before their children.

        Text after the first stop string is left out: later threads are missing, and the others end with "stop" at the token
        that completed it, or at the [Fork] towards that token.
        """
        cuts = self._cuts()
        texts: dict[Path, str] = {}
        left = len(self.text)
        for state, segment in _in_order(self._root, cuts):
            text = "".join(segment.parts)[:left]
            left -= len(text)
            texts[state.path] = texts.get(state.path, "") + text
        return tuple(self._thread_text(self._states[path], text, cuts) for path, text in texts.items())

    def tokens(self) -> tuple[int, ...]:
        """The tokens of the finished text in reading order, without any [Fork]."""
        return tuple(token for state, part in self._parts() for token in state.tokens[part])

    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """The log probabilities of these tokens, if they were requested."""
        return tuple(logprob for state, part in self._parts() for logprob in self._logprobs_of(state, part))

    def _segment(self, context: tuple[int, ...] = (), start: int = 0) -> Segment:
        """A new segment behind these tokens."""
        stream = TextStream(self._tokenizer, context, self._skip_special)
        return Segment(stream, StopSearch(self._stops, self._include_stop), start)

    def _split(self, state: _ThreadState, thread: Thread) -> None:
        """Start the segment after a [Fork]."""
        # up to the [Fork]: when events are replayed, the thread may have more tokens already
        context = context_of(self._tokenizer, thread.tokens[: thread.start + len(state.tokens)])
        state.segments.append(self._segment(context, len(state.tokens)))
        state.children.append(None)
        if self._front is state:
            state.read += 1

    def _close(self, state: _ThreadState) -> tuple[str, str]:
        """Text of a thread that the end of its last segment releases, and the part of it that can be read now."""
        text, rest = state.segments[-1].finish()
        return text, self._follow(state, rest) if rest else ""

    def _follow(self, state: _ThreadState, part: str) -> str:
        """Readable text after a part of a thread's text has come."""
        segment = state.segments[-1]
        if segment.search.stopped:
            self._bound = _end(state.path)
        return self._read(state, part, segment.end) if state is self._front else ""

    def _advance(self) -> str:
        """Readable text after the thread that is read has ended."""
        released = []
        while (state := self._front) is not None and self._cut is None:
            if state.read < len(state.children):
                child = state.children[state.read]
                state.read += 1
                self._front = state if child is None else child
            elif state.ending is not None:
                self._front = state.parent
            else:
                break
            released.append(self._catch_up())
        return "".join(released)

    def _catch_up(self) -> str:
        """Readable text that the next segment has already."""
        state = self._front
        if state is None:
            self._shown.append(self._search.finish())
            return self._shown[-1]
        segment = state.segments[state.read]
        released = []
        for count, part in enumerate(segment.parts, segment.start + 1):
            released.append(self._read(state, part, count))
            if self._cut is not None:
                break
        return "".join(released)

    def _read(self, state: _ThreadState, part: str, count: int) -> str:
        """Readable text of a part of a thread's text; `count` is the number of the thread's tokens at its end."""
        shown = self._search.push(part)
        self._shown.append(shown)
        if self._search.stopped:
            self._cut, self._bound = (state, count), ()
        return shown

    def _lengthen(self, thread: Thread, text: str, reading: str) -> None:
        """Add released text to the thread's last piece, or as a piece without a token."""
        for index in reversed(range(len(self._pieces))):
            piece = self._pieces[index]
            if piece.thread == thread.path:
                self._pieces[index] = replace(piece, text=piece.text + text, reading=piece.reading + reading)
                return
            if reading and piece.reading:
                break  # text that is read later must come later
        self._pieces.append(Piece(text, None, False, thread.path, reading))

    def _parts(self) -> Iterator[tuple[_ThreadState, slice]]:
        """The tokens of the finished text as slices of threads, in reading order, without any [Fork]."""
        cuts = self._cuts()
        for state, segment in _in_order(self._root, cuts):
            yield state, slice(segment.start, min(segment.end, cuts.get(state.path, segment.end)))

    def _logprobs_of(self, state: _ThreadState, part: slice) -> list[TokenLogprob]:
        """The log probabilities of some tokens of a thread; empty if they were not requested."""
        if self._logprobs is None:
            return []
        return [self._logprobs.at(state.path, index) for index in range(*part.indices(len(state.tokens)))]

    def _cuts(self) -> dict[Path, int]:
        """Number of remaining tokens of each thread that the first stop string cuts."""
        cuts: dict[Path, int] = {}
        if self._cut is not None:
            state, count = self._cut
            cuts[state.path] = count
            while state.parent is not None:
                cuts[state.parent.path] = state.fork + 1
                state = state.parent
        return cuts

    def _thread_text(self, state: _ThreadState, text: str, cuts: Mapping[Path, int]) -> ThreadText:
        part = slice(0, cuts.get(state.path))
        tokens, logprobs = state.tokens[part], self._logprobs_of(state, part)
        ending = "stop" if state.path in cuts else state.ending
        assert ending is not None
        fork = None if state.parent is None else state.fork
        return ThreadText(state.path, fork, text, tuple(tokens), ending, tuple(logprobs))


def _in_order(state: _ThreadState, cuts: Mapping[Path, int]) -> Iterator[tuple[_ThreadState, Segment]]:
    """The segments of a thread and its children that are not cut off, in reading order."""
    if state.ending is None and state.path not in cuts:
        raise ValueError(f"thread {state.path} has not ended: there is no finished text")
    for segment, child in zip_longest(state.segments, state.children):
        yield state, segment
        if child is not None and child.fork < cuts.get(state.path, math.inf):
            yield from _in_order(child, cuts)


def _end(path: Path) -> tuple[float, ...]:
    """Sort key of a thread's end in reading order: after all its children, before its parent and later siblings."""
    return (*path, math.inf)
