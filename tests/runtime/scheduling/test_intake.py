"""Intake: requests count, and may end, from the moment they are handed over; the event loop does not admit them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event, Semaphore, current_thread
from threading import enumerate as enumerate_threads
from typing import Any, TypeVar

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import QueueFull
from spaceport.runtime.scheduling.stream import AsyncStream
from spaceport.runtime.scheduling.worker import RuntimeClosed
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt, PromptEncoder
from support.hash_engine import Language
from support.hash_runtime import hash_runtime

ENDLESS = Language(3, end_every=10**9)  # goes on to its limit
FIVE = Decoding(max_tokens=5)
T = TypeVar("T")


@dataclass
class Gate:
    """Lets prompts be tokenized one by one, and notes where that happens."""

    began: Semaphore = field(default_factory=lambda: Semaphore(0))
    leave: Semaphore = field(default_factory=lambda: Semaphore(0))
    threads: list[str] = field(default_factory=list)

    async def wait(self, count: int = 1) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self.began.acquire, timeout=60)

    def go(self) -> None:
        self.leave.release(1000)  # each takes a microsecond


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Stops each text before it is tokenized."""
    found, tokens_of = Gate(), PromptEncoder.tokens_of

    def gated(self: PromptEncoder, prompt: Prompt, parse_special: bool = False, **others: Any) -> list[int]:
        if isinstance(prompt, str):
            found.threads.append(current_thread().name)
            found.began.release()
            assert found.leave.acquire(timeout=60)
        return tokens_of(self, prompt, parse_special, **others)

    monkeypatch.setattr(PromptEncoder, "tokens_of", gated)
    yield found
    found.go()


def within_a_minute(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


async def nothing_queued(runtime: Runtime) -> None:
    while runtime.status().queued_requests:
        await asyncio.sleep(0.001)


def test_a_stream_is_admitted_outside_of_the_event_loop_and_that_time_counts(gate: Gate) -> None:
    with hash_runtime(ENDLESS) as runtime:

        async def read() -> tuple[int, ...]:
            stream = runtime.astream("abc", Decoding(max_tokens=5, timeout=1000))
            await gate.wait()  # the loop goes on meanwhile
            await asyncio.sleep(0.05)
            assert runtime.status().queued_requests == 1
            assert stream.statistics.prompt_tokens == 0
            gate.go()
            await stream.submitted()
            assert stream.statistics.prompt_tokens == 3
            pieces = [piece.token async for piece in stream]
            found = await stream.completion()
            assert tuple(pieces) == found.tokens
            assert 1000 > found.statistics.first_token_seconds >= found.statistics.waiting_seconds > 0.05
            await asyncio.sleep(0)
            loop = asyncio.get_running_loop()
            timers = [timer.when() - loop.time() for timer in getattr(loop, "_scheduled") if not timer.cancelled()]  # noqa: B009  (private)
            assert max(timers, default=0) < 100  # the deadline's is gone
            return found.tokens

        assert within_a_minute(read()) == runtime.generate("abc", FIVE).tokens
    assert [name.startswith("spaceport-admission") for name in gate.threads] == [True, False]


def test_requests_that_are_being_admitted_count_towards_the_queue(gate: Gate) -> None:
    with hash_runtime(ENDLESS, queue_limit=1) as runtime:

        async def fill() -> None:
            streams = [runtime.astream("abc", FIVE) for _ in range(2)]  # one runs at once, one may wait
            with pytest.raises(QueueFull, match="1 requests wait already, queue_limit is 1"):
                runtime.astream("abc", FIVE)
            with pytest.raises(QueueFull):
                await asyncio.to_thread(runtime.generate, "abc", FIVE)
            with pytest.raises(QueueFull):
                await runtime.ascore("abc")
            streams[1].close()
            assert (await streams[1].completion()).ending == "cancelled"
            gate.leave.release(2)  # both have begun; the reservation ends when the cancelled one is tokenized
            await nothing_queued(runtime)
            later = runtime.astream("abc", FIVE)
            gate.go()
            assert (await later.completion()).tokens == (await streams[0].completion()).tokens

        within_a_minute(fill())


def test_a_refused_request_does_not_count_any_longer() -> None:
    with hash_runtime(ENDLESS, queue_limit=0) as runtime:
        for _ in range(3):
            with pytest.raises(OptionFault):
                runtime.generate("a" * 100, FIVE)
            for ask in (runtime.agenerate("a" * 100, FIVE), runtime.ascore("a" * 100), runtime.agenerate([1] * 100)):
                with pytest.raises(OptionFault):
                    within_a_minute(ask)
            assert runtime.status().queued_requests == 0


@pytest.mark.parametrize("how", ["deadline", "closed", "garbage", "cancelled"])
def test_a_request_that_ends_before_it_is_admitted_does_not_reach_the_engine(gate: Gate, how: str) -> None:
    """Four requests, of which two are being tokenized and two wait."""
    with hash_runtime(ENDLESS) as runtime:

        async def end() -> None:
            decoding = Decoding(max_tokens=5, timeout=0.01 if how == "deadline" else None)
            streams = [runtime.astream("abc", decoding) for _ in range(4)]
            await gate.wait(2)
            if how == "garbage":
                streams.clear()
                gc.collect()
            elif how == "cancelled":
                for task in [asyncio.create_task(stream.completion()) for stream in streams]:
                    await asyncio.sleep(0)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
            elif how == "closed":
                for stream in streams[::-1]:
                    stream.close()
            for stream in streams:
                found = await stream.completion()
                ending = "deadline" if how == "deadline" else "cancelled"
                assert (found.ending, found.text, [thread.ending for thread in found.threads]) == (ending, "", [ending])
                assert [piece async for piece in stream] == []
            # what has not begun is free at once
            assert runtime.status().queued_requests == (4 if how == "garbage" else 2)
            scoring = asyncio.create_task(runtime.ascore("abc"))
            await asyncio.sleep(0)
            scoring.cancel()
            with pytest.raises(asyncio.CancelledError):
                await scoring
            gate.go()
            await nothing_queued(runtime)

        within_a_minute(end())
        assert runtime.status().ended_requests == 0
    assert len(gate.threads) == 2


def test_closing_fails_a_request_that_comes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = hash_runtime(ENDLESS)
    streams: list[AsyncStream] = []
    shutdown = ThreadPoolExecutor.shutdown

    def enter_before(pool: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if not streams:
            runtime._intake._pool.submit(entered.wait, 60)  # both OS threads are busy
            runtime._intake._pool.submit(entered.wait, 60)
            streams.append(runtime.astream("abc", FIVE))
        shutdown(pool, wait, cancel_futures=cancel_futures)

    async def close() -> None:
        runtime.close()
        with pytest.raises(RuntimeClosed, match="closed before the completion ended"):
            await asyncio.wait_for(streams[0].completion(), 10)

    entered = Event()
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "shutdown", enter_before)
        within_a_minute(close())
    entered.set()


def test_a_stream_without_an_event_loop_is_refused_and_does_not_count() -> None:
    with hash_runtime(ENDLESS, queue_limit=1) as runtime:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no running event loop"):
                runtime.astream("abc", FIVE)
        assert runtime.status().queued_requests == 0


def test_closing_fails_requests_that_are_being_admitted(gate: Gate) -> None:
    runtime = hash_runtime(ENDLESS)

    async def close() -> None:
        streams = [runtime.astream("abc", FIVE) for _ in range(3)]
        await gate.wait(2)
        runtime.close()  # does not wait for them
        for stream in streams:
            with pytest.raises(RuntimeClosed, match="closed before the completion ended"):
                await stream.completion()
        with pytest.raises(RuntimeClosed, match="the runtime is closed"):
            runtime.astream("abc", FIVE)

    within_a_minute(close())
    gate.go()
    for thread in enumerate_threads():
        if thread.name.startswith("spaceport-admission"):
            thread.join(60)
    assert len(gate.threads) == 2


def test_a_long_text_is_not_tokenized_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    with hash_runtime(ENDLESS) as runtime:
        longest = 16 * runtime.max_seq_len
        lengths: list[int] = []

        def noted(_: object, text: str, **__: object) -> list[int]:
            lengths.append(len(text))
            return [1]

        monkeypatch.setattr(type(runtime._admission.prompts.controls), "ids", noted)
        runtime.generate("a" * longest, FIVE)
        for ask in (runtime.generate, runtime.score):
            with pytest.raises(OptionFault, match="has more than 128 tokens, max_seq_len is 64: shorten the"):
                ask("a" * (longest + 1))
        # few tokens, since the tokenizer drops unknown characters
        runtime.generate("ax" * 9 + "\u200b" * longest, FIVE)
        assert lengths == [longest, longest + 18]
