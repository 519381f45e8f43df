"""Load: hundreds of requests, eight at a time, some cancelled and some late; all end, and nothing is left."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.runtime.decode.request import Request
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch, EngineFault
from spaceport.runtime.scheduling.generation import Completion
from spaceport.runtime.session import Runtime
from support.hash_engine import END, FORK, Language
from support.hash_runtime import CountingEngine, hash_runtime
from support.paths import DEMO as MODEL

ASKED: dict[str, Any] = json.loads((MODEL / "prompts.json").read_text("utf-8"))
LANGUAGE = Language(11, 70, end_every=30, fork_every=12)
SLOTS = 8
PLAIN = Decoding(max_tokens=30, fork=False, mask_slots=0)  # one row per step: all go into one call
DRAFTS: list[dict[str, Any]] = [{"draft": "chain"}, {}, {"lookup": 4}]


@dataclass(frozen=True)
class Order:
    """A text to ask for."""

    prompt: Sequence[int]
    decoding: Decoding
    pieces: int | None = None  # after which it is given up


def serve(runtime: Runtime, order: Order) -> Completion:
    """Ask for a text, and read it as far as it is wanted."""
    with runtime.stream(order.prompt, order.decoding) as stream:
        if order.pieces is not None:
            for _, _ in zip(range(order.pieces), stream, strict=False):
                pass
            stream.close()
        return stream.completion()


def alive() -> int:
    """Requests and threads that anybody still holds."""
    gc.collect()
    # by type() and not isinstance(), which asks some objects of other libraries for a deprecated class
    return sum(type(thing) in (Request, Thread) for thing in gc.get_objects())


def orders(count: int, seed: int) -> list[Order]:
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        decoding = Decoding(
            max_tokens=int(random.integers(1, 40)),
            mask_slots=int(random.integers(0, 4)),
            **DRAFTS[random.integers(len(DRAFTS))],
            max_threads=(1, 4, 16)[random.integers(3)],
            max_depth=int(random.integers(3)),
            max_total_tokens=600,
            timeout=float(random.uniform(0.001, 0.2)) if random.random() < 0.15 else None,
        )
        prompt = random.integers(0, END, random.integers(1, 80)).tolist()
        found.append(Order(prompt, decoding, int(random.integers(0, 20)) if random.random() < 0.2 else None))
    return found


def hold_alone(order: Order, found: Completion) -> None:
    """What was written is what the text is alone, or the beginning of each of its threads."""
    limit = len(order.prompt) + (order.decoding.max_tokens or 0)
    alone = LANGUAGE.tree(order.prompt, limit, order.decoding.max_depth)
    threads = {thread.path: list(thread.tokens) for thread in found.threads}
    if found.ending in ("cancelled", "deadline"):
        assert order.pieces is not None or order.decoding.timeout is not None
        assert all(alone[path][: len(tokens)] == tokens for path, tokens in threads.items())
    else:
        assert threads == alone
        assert len(found.tokens) == sum(token != FORK for tokens in alone.values() for token in tokens)


def loaded_runtime() -> tuple[Runtime, HoldingEngine]:
    with hash_runtime(LANGUAGE, max_seq_len=128, max_slots=800) as like:
        engine = HoldingEngine(LANGUAGE, like.engine.capacity, SLOTS)
        engine.held.set()
        return Runtime(like.bundle, engine, 128, 800), engine


def test_two_hundred_requests_over_eight_slots_equal_each_alone_and_leave_nothing_behind() -> None:
    wanted = orders(200, 0)
    runtime, engine = loaded_runtime()
    before = alive()
    with runtime, ThreadPoolExecutor(40) as pool:
        found = list(pool.map(lambda order: serve(runtime, order), wanted))
        for order, completion in zip(wanted, found, strict=True):
            hold_alone(order, completion)
        endings = [completion.ending for completion in found]
        assert endings.count("cancelled") > 0
        assert set(endings) >= {"end", "length", "cancelled"}
        assert alive() == before
        # and the maximum number at once
        engine.held.clear()
        long = [number for number in range(END) if len(LANGUAGE.write([number], 30)) > 3] * 4
        streams = [runtime.stream([number], PLAIN) for number in long[:SLOTS]]
        engine.lines.clear()
        engine.held.set()
        for number, stream in zip(long, streams, strict=False):
            assert list(stream.completion().tokens) == LANGUAGE.write([number], 30)
        assert max(requests for requests, _ in engine.lines) == SLOTS


@dataclass
class HoldingEngine(CountingEngine):
    """A fake engine that can be held."""

    held: Event = field(default_factory=Event)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        assert self.held.wait(60)
        return super().run(batch)


def test_of_a_text_that_failed_nothing_is_left_either() -> None:
    runtime, engine = loaded_runtime()
    before = alive()
    with runtime:
        for at in range(5):
            engine.lines = Breaking(at)
            with pytest.raises(EngineFault):
                runtime.generate([1, 2, 3], Decoding(max_tokens=30))
        engine.lines = []
        assert runtime.generate([1, 2, 3], Decoding(max_tokens=9)).tokens
        assert alive() == before


class Breaking(list[tuple[int, int]]):
    """What a call is noted in, until the call that fails."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def append(self, call: tuple[int, int]) -> None:
        if len(self) == self.at:
            raise EngineFault("the fake engine failed")
        super().append(call)


@pytest.mark.slow
@pytest.mark.parametrize("bundle", ["demo_bundle", pytest.param("demo_int8_bundle", marks=pytest.mark.nightly)])
def test_sixty_texts_of_the_demo_model_are_what_each_is_alone(request: pytest.FixtureRequest, bundle: str) -> None:
    folder: Path = request.getfixturevalue(bundle)
    random = np.random.default_rng(5)
    chat = [{"role": "user", "content": ASKED["triangular"]["user"]}]
    prompts = [chat, ASKED["source"], "import json\n", "class Reader:\n", "def close(self):\n", chat]
    plain = Decoding(max_tokens=48, mask_slots=0, max_threads=1)
    with Runtime.open(folder, threads=1, max_seq_len=192) as runtime:
        alone = [runtime.generate(prompt, plain) for prompt in prompts]
    with (
        Runtime.open(folder, threads=1, max_seq_len=192, max_requests=SLOTS) as runtime,
        ThreadPoolExecutor(24) as pool,
    ):

        def one(number: int) -> Completion:
            seed = np.random.default_rng(number)
            way = Decoding(max_tokens=48, mask_slots=int(seed.integers(6)), lookup=int(seed.integers(2)) * 5)
            if number % 10 == 9:
                way = replace(way, timeout=float(seed.uniform(0.001, 0.3)))
            with runtime.stream(prompts[number % len(prompts)], way) as stream:
                if number % 10 == 4:
                    next(stream, None)
                    stream.close()
                return stream.completion()

        for number, found in zip(order := random.permutation(60).tolist(), pool.map(one, order), strict=True):
            expected = alone[number % len(prompts)]
            if found.ending in ("deadline", "cancelled"):
                assert number % 10 in (4, 9)
                whole = {thread.path: thread.text for thread in expected.threads}
                assert all(whole[thread.path].startswith(thread.text) for thread in found.threads)
            else:
                assert (found.text, found.tokens, found.ending) == (expected.text, expected.tokens, expected.ending)
