"""Scripted threads: the output of each thread, generated in any order, and the result in reading order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from random import Random

import numpy as np
from hypothesis import strategies as st
from tokenizers import Tokenizer

from spaceport.runtime.decode.sequence import Ending, TokenSequence, root_sequence
from spaceport.runtime.text.tokenizer import encode
from spaceport.runtime.text.transcript import Piece, ThreadText, Transcript
from support.small_tokenizers import BROKEN, BYTES, FALLBACK, cut_at, full, one_byte_each

FORK, CHILD = 1, 0  # special tokens of both tokenizers

Path = tuple[int, ...]
Outcome = tuple[str, tuple[int, ...], tuple[ThreadText, ...]]  # text, tokens and threads of a completion


@dataclass(frozen=True)
class Script:
    """The output of a thread without stop strings; a nested script is a [Fork] with its child."""

    said: tuple[int | Script, ...]
    ending: Ending = "end"


@dataclass(frozen=True)
class Event:
    """An event in reading order: a thread begins, generates a token, or ends."""

    path: Path
    token: int | None = None
    text: str = ""
    ending: Ending | None = None


def prompt(tokenizer: Tokenizer) -> list[int]:
    """The prompt."""
    return encode(tokenizer, "the", special=False)


def line(*said: str | Script, ending: Ending = "end") -> Script:
    """A script with one token for each byte."""
    tokens = ([item] if isinstance(item, Script) else one_byte_each(item) for item in said)
    return Script(tuple(item for run in tokens for item in run), ending)


def said(tokenizer: Tokenizer, tokens: Sequence[int], begins: bool) -> list[str]:
    """The complete characters that each token of a segment adds; the last one adds the rest."""
    lead = [] if begins else prompt(tokenizer)
    texts = [full(tokenizer, [*lead, *tokens[:n]])[len(full(tokenizer, lead)) :] for n in range(len(tokens) + 1)]
    shown, parts = "", []
    for text in [*(text.rstrip(BROKEN) for text in texts[1:-1]), *texts[-1:]][: len(tokens)]:
        parts.append(text[len(shown) :])
        shown = max(shown, text, key=len)
    return parts


def events_of(tokenizer: Tokenizer, script: Script, path: Path = ()) -> Iterator[Event]:
    """The events of a whole tree in reading order."""
    yield Event(path)
    forks = 0
    first = True
    for splits, run in groupby(script.said, lambda item: isinstance(item, Script) or item == FORK):
        if not splits:
            tokens = [item for item in run if isinstance(item, int)]
            parts = said(tokenizer, tokens, first and not path)
            yield from (Event(path, token, part) for token, part in zip(tokens, parts, strict=True))
        else:
            for item in run:
                yield Event(path, FORK)
                if isinstance(item, Script):
                    yield from events_of(tokenizer, item, (*path, forks))
                    forks += 1
        first = False
    yield Event(path, ending=script.ending)


def outcome(events: Sequence[Event], stops: Sequence[str]) -> Outcome:
    """Text, tokens and threads of a whole tree, cut at the first stop string."""
    whole = "".join(event.text for event in events)
    text, cut = cut_at(whole, stops)
    if cut:
        end = next(size for size in range(len(whole) + 1) if cut_at(whole[:size], stops)[1])
        last = next(n for n in range(len(events)) if sum(len(event.text) for event in events[: n + 1]) >= end)
        events = events[: last + 1]
    tokens: dict[Path, list[int]] = {}
    forks: dict[Path, int | None] = {}
    texts: dict[Path, str] = {}
    endings: dict[Path, Ending] = {}
    left = len(text)
    for event in events:
        if event.token is not None:
            tokens[event.path].append(event.token)
            texts[event.path] += event.text[:left]
            left -= len(event.text[:left])
        elif event.ending is not None:
            endings[event.path] = event.ending
        else:
            forks[event.path] = len(tokens[event.path[:-1]]) - 1 if event.path else None
            tokens[event.path], texts[event.path] = [], ""
    threads = tuple(
        ThreadText(path, forks[path], texts[path], tuple(own), endings.get(path, "stop"))
        for path, own in tokens.items()
    )
    return text, tuple(event.token for event in events if event.token is not None and event.token != FORK), threads


BYTE_TOKENS = (
    st.text("ab你 \n", max_size=5).map(one_byte_each)
    | st.text("ab你 \n", max_size=8).map(lambda text: encode(BYTES, text, special=False))
    | st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=3)
)
FALLBACK_TOKENS = st.text("athek日é \n", max_size=6).map(lambda text: encode(FALLBACK, text, special=False))


def scripts(tokens: st.SearchStrategy[list[int]], depth: int = 3) -> st.SearchStrategy[Script]:
    pieces: st.SearchStrategy[list[int | Script]] = tokens.map(list)
    if depth:
        pieces |= scripts(tokens, depth - 1).map(lambda child: [child])
    joined = st.lists(pieces, max_size=4).map(lambda runs: tuple(item for run in runs for item in run))
    return st.builds(Script, joined, st.sampled_from(("end", "length")))


@st.composite
def cases(draw: st.DrawFn, tokenizer: Tokenizer) -> tuple[Script, list[str]]:
    """A tree of threads and stop strings, most of which occur in its text."""
    script = draw(scripts(BYTE_TOKENS if tokenizer is BYTES else FALLBACK_TOKENS))
    events = list(events_of(tokenizer, script))
    text = "".join(event.text for event in events)
    borders = [len("".join(event.text for event in events[:n])) for n in range(len(events)) if not events[n].text]
    starts = st.integers(0, len(text)) | st.sampled_from(borders).map(lambda border: max(0, border - 1))
    within = st.tuples(starts, st.integers(1, 4)).map(lambda at: text[at[0] :][: at[1]])
    stops = draw(st.lists(within | st.text("ab你 \n", max_size=3), max_size=2))
    return script, [stop for stop in stops if stop]


class Writing:
    """The threads of a request, which generate their scripts at any speed."""

    def __init__(self, tokenizer: Tokenizer, script: Script, stops: Sequence[str] = ()) -> None:
        self.reading = Transcript(tokenizer, tuple(stops), FORK)
        self.threads: dict[Path, TokenSequence] = {}
        self.scripts: dict[Path, Script] = {}
        self._left: dict[Path, Iterator[int | Script]] = {}
        self._begin(root_sequence(prompt(tokenizer), 1), script)

    @property
    def live(self) -> list[TokenSequence]:
        return [thread for thread in self.threads.values() if thread.ending is None]

    @property
    def outcome(self) -> Outcome:
        return self.reading.text, self.reading.tokens(), self.reading.finished()

    def write(self, path: Path, count: int = 10**9) -> list[Piece]:
        """Append tokens to a thread, or its end, as a request does; returns the new pieces."""
        thread = self.threads[path]
        for _ in range(count):
            if thread.ending is not None:
                break
            self._write(thread)
        return self.reading.take()

    def run(self, random: Random) -> list[Piece]:
        """Run all threads to their ends in steps of some threads and tokens; returns all pieces in order."""
        pieces: list[Piece] = []
        while self.step(random):
            if random.random() < 0.7:
                pieces += self.reading.take()
        return pieces + self.reading.take()

    def step(self, random: Random) -> bool:
        """Append some tokens to some threads; returns whether any thread was live."""
        live = self.live
        for thread in random.sample(live, random.randint(min(1, len(live)), len(live))):
            for _ in range(random.randint(1, 5)):
                if thread.ending is None:
                    self._write(thread)
        for thread in self.live:
            if self.reading.is_cut_off(thread):
                self.end(thread.path, "stop")
        return bool(live)

    def end(self, path: Path, ending: Ending) -> None:
        """End a thread."""
        self.threads[path].ending = ending
        self.reading.on_end(self.threads[path])

    def _begin(self, thread: TokenSequence, script: Script) -> None:
        self.threads[thread.path] = thread
        self.scripts[thread.path] = script
        self._left[thread.path] = iter(script.said)

    def _write(self, thread: TokenSequence) -> None:
        item = next(self._left[thread.path], None)
        if item is None:
            self.end(thread.path, self.scripts[thread.path].ending)
            return
        token = FORK if isinstance(item, Script) else item
        thread.tokens.append(token)
        if self.reading.on_token(thread, token, drafted=len(thread.generated) % 2 == 0):
            self.end(thread.path, "stop")
        elif isinstance(item, Script):
            child = thread.child(len(thread.tokens) - 1, CHILD, np.empty(0, np.int64))
            self._begin(child, item)
            self.reading.on_fork(thread, child)
