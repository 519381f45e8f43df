"""Session: the public way from a prompt to text."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType

from spaceport.graphs.faults import OptionFault
from spaceport.graphs.manifest import Manifest
from spaceport.graphs.signature import visible_length
from spaceport.runtime.backends import open_engine
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.runtime.chat import Message, render
from spaceport.runtime.choice import greedy
from spaceport.runtime.draft import Drafting
from spaceport.runtime.engine import Engine
from spaceport.runtime.loop import step
from spaceport.runtime.request import Request
from spaceport.runtime.slots import Slots
from spaceport.runtime.statistics import Statistics
from spaceport.runtime.text import TextStream, encode, open_tokenizer
from spaceport.runtime.threads import Ending, Thread, new_thread

DEFAULT_SEQ_LEN = 4096
DEFAULT_CHUNK = (
    512  # rows of a prompt step: enough to keep the matrix products full, small enough to stay interruptible
)

Prompt = str | Sequence[int] | Sequence[Message]


class RuntimeBusy(RuntimeError):
    """Another text is under way on the same runtime."""


@dataclass(frozen=True)
class Piece:
    """What one token added to a text."""

    text: str  # may be empty: half a character, or what may become a stop string, is held back
    token: int
    drafted: bool  # an accepted candidate, and not the network's own next prediction
    thread: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A finished text."""

    text: str
    tokens: tuple[int, ...]
    ending: Ending  # "end": end of text; "stop": a stop string; "length": max_tokens or max_seq_len
    statistics: Statistics
    prompt_tokens: tuple[int, ...] = ()


class Stream:
    """A text under way: iterate for its pieces, then ask for the completion; closing it early frees the runtime."""

    def __init__(self, runtime: Runtime, request: Request, text: TextStream) -> None:
        self._runtime = runtime
        self._request = request
        self._text = text
        self._pieces: list[Piece] = []
        self._iterator = self._run()
        request.listener = self._hear

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._iterator)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the text where it is."""
        self._iterator.close()
        self._runtime._finish(self)

    def completion(self) -> Completion:
        """The whole text, run to its end."""
        for _ in self:
            pass
        (thread,) = self._request.threads
        if thread.ending is None:
            raise ValueError("the stream was closed before its text ended: there is no completion")
        prompt, own = thread.tokens[: thread.start], thread.written
        return Completion(self._text.text, tuple(own), thread.ending, self._request.statistics, tuple(prompt))

    def _run(self) -> Generator[Piece, None, None]:
        request = self._request
        try:
            while request.live:
                started = perf_counter()
                before = request.statistics.engine_seconds
                step(self._runtime.engine, [request])
                inside = request.statistics.engine_seconds - before
                request.statistics.outside_seconds += perf_counter() - started - inside
                if not request.live and (rest := self._text.finish()):
                    last = self._pieces.pop() if self._pieces else None
                    self._pieces.append(_longer(last, rest, request.threads[0]))
                yield from self._pieces
                self._pieces.clear()
        finally:
            self._runtime._finish(self)

    def _hear(self, thread: Thread, token: int, drafted: bool) -> bool:
        self._pieces.append(Piece(self._text.push(token), token, drafted, thread.path))
        return self._text.stopped


class Runtime:
    """A bundle, opened: prompts in, text out."""

    def __init__(self, bundle: Bundle, engine: Engine, max_seq_len: int, chunk: int = DEFAULT_CHUNK) -> None:
        self.bundle = bundle
        self.engine = engine
        self.max_seq_len = max_seq_len
        self.tokenizer = open_tokenizer(bundle)
        self._chunk = chunk
        self._active: Stream | None = None
        self._closed = False

    @classmethod
    def open(
        cls,
        bundle: str | os.PathLike[str],
        *,
        backend: str = "auto",
        max_seq_len: int | None = None,
        threads: int = 0,
    ) -> Runtime:
        """The bundle on the best backend that is installed, with room for texts of `max_seq_len` tokens."""
        opened = open_bundle(bundle)
        length = seq_len(opened.manifest, max_seq_len)
        engine = open_engine(opened, backend, capacity_for(opened.manifest, length), 1, threads)
        return cls(opened, engine, length)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        mask_slots: int | None = None,
        stop: Sequence[str] = (),
    ) -> Completion:
        """The text that follows a prompt; see `stream` for the options."""
        with self.stream(prompt, max_tokens=max_tokens, mask_slots=mask_slots, stop=stop) as stream:
            return stream.completion()

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        mask_slots: int | None = None,
        stop: Sequence[str] = (),
    ) -> Stream:
        """The text that follows a prompt, piece by piece.

        `prompt` is text, token ids, or chat messages. `mask_slots` says how many tokens each step drafts (0: none;
        by default as many as the bundle has): it changes how long the text takes and never what it is.
        """
        if self._closed:
            raise RuntimeError("the runtime is closed")
        if self._active is not None:
            raise RuntimeBusy("the runtime is writing another text: finish or close its stream first")
        stops = _stops(stop)
        ids = self.tokens_of(prompt)
        request = self._request(ids, self._limit(ids, max_tokens), self._mask_slots(mask_slots))
        self._active = Stream(self, request, TextStream(self.tokenizer, stops))
        return self._active

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """The token ids that a prompt is fed as."""
        if isinstance(prompt, str):
            if not prompt:
                raise OptionFault("the prompt is empty: expected at least one character")
            ids = encode(self.tokenizer, prompt, special=True)
        elif len(prompt) and all(isinstance(item, int) for item in prompt):
            ids = [item for item in prompt if isinstance(item, int)]
        else:
            messages = [item for item in prompt if not isinstance(item, int)]
            ids = encode(self.tokenizer, render(self.bundle, messages), special=False)
        vocab = self.bundle.manifest.signature.vocab_size
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise OptionFault(f"the prompt holds the token id {wrong}: expected ids from 0 to {vocab - 1}")
        if not ids:
            raise OptionFault("the prompt has no tokens: expected at least one")
        return ids

    def close(self) -> None:
        """End what is under way and free the engine."""
        if self._active is not None:
            self._active.close()
        self._closed = True
        self.engine.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _limit(self, ids: Sequence[int], max_tokens: int | None) -> int:
        room = self.max_seq_len - len(ids)
        if room < 1:
            raise OptionFault(
                f"the prompt has {len(ids)} tokens, max_seq_len is {self.max_seq_len}: shorten the prompt, or raise max_seq_len "
                f"(--max-seq-len; the model goes up to {self.bundle.manifest.max_positions})"
            )
        if max_tokens is None:
            return self.max_seq_len
        if max_tokens < 1:
            raise OptionFault(f"max_tokens is {max_tokens}: expected at least 1")
        if max_tokens > room:
            raise OptionFault(
                f"{len(ids)} prompt tokens and max_tokens {max_tokens} make {len(ids) + max_tokens}, max_seq_len is "
                f"{self.max_seq_len}: lower max_tokens to {room}, or raise max_seq_len (--max-seq-len)"
            )
        return len(ids) + max_tokens

    def _mask_slots(self, mask_slots: int | None) -> int:
        most = self.bundle.manifest.max_mask_slots
        if mask_slots is None:
            return most
        if not 0 <= mask_slots <= most:
            reason = (
                f"the bundle was exported with up to {most} mask slots"
                if most
                else "the bundle has no mask token and only decodes plainly"
            )
            raise OptionFault(f"mask_slots is {mask_slots}: expected 0 to {most} ({reason})")
        return mask_slots

    def _request(self, ids: list[int], limit: int, mask_slots: int) -> Request:
        tokens = self.bundle.manifest.tokens
        capacity = self.engine.capacity
        return Request(
            index=0,
            slots=Slots(capacity, self.engine.signature.lowering),
            threads=[new_thread(ids, capacity)],
            tokens=tokens,
            choose=greedy((*tokens.unwritable, *tokens.forking)),  # one thread writes the whole text
            limit=limit,
            total=limit,
            drafting=Drafting(mask_slots, "chain"),
            chunk=self._chunk,
            end=frozenset(tokens.end),
            statistics=Statistics(prompt_tokens=len(ids)),
        )

    def _finish(self, stream: Stream) -> None:
        if self._active is stream:
            self._active = None


def seq_len(manifest: Manifest, max_seq_len: int | None) -> int:
    """The longest text that a runtime makes room for."""
    if max_seq_len is None:
        return min(manifest.max_positions, DEFAULT_SEQ_LEN)
    if not 2 <= max_seq_len <= manifest.max_positions:
        raise OptionFault(
            f"max_seq_len is {max_seq_len}: expected 2 to {manifest.max_positions}, the positions that the model knows"
        )
    return max_seq_len


def capacity_for(manifest: Manifest, max_seq_len: int, chunk: int = DEFAULT_CHUNK) -> int:
    """Slots of a request: its longest text, the rows of its widest step, and one that padding rows write to."""
    widest = (manifest.max_mask_slots + 1) ** 2
    if manifest.signature.lowering == "append":
        widest = max(widest, chunk)  # all requests of a step write runs of one length, a prompt chunk's at most
    return visible_length(max_seq_len + widest + 1)


def _stops(stop: Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(one, str) and one for one in stops):
        raise OptionFault(f"stop is {stop!r}: expected strings of at least one character")
    return stops


def _longer(last: Piece | None, rest: str, thread: Thread) -> Piece:
    """The last piece with the text that was held back behind it."""
    if last is None:
        return Piece(rest, thread.tokens[-1], False, thread.path)
    return Piece(last.text + rest, last.token, last.drafted, last.thread)
