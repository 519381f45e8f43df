"""Intake and asyncio: requests count and may end from the moment they are handed over, and texts end with their readers."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event, Semaphore, current_thread
from threading import enumerate as enumerate_threads
from time import sleep
from typing import Any, TypeVar

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import EngineFault
from spaceport.runtime.scheduling.request_queue import QueueFull
from spaceport.runtime.scheduling.stream import AsyncStream
from spaceport.runtime.scheduling.worker import RuntimeClosed
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt, PromptEncoder
from support.hash_engine import Language
from support.hash_runtime import hash_runtime, stepwise_runtime
from support.paths import ROOT

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
            with pytest.raises(RuntimeError, match="no running event loop"):
                runtime.astream("abc", FIVE)
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
            await asyncio.wait_for(streams[0].completion(), 60)

    entered = Event()
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "shutdown", enter_before)
        within_a_minute(close())
    entered.set()


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


# Texts under asyncio and in forked processes

PLAIN = Decoding(mask_slots=0)


@pytest.mark.parametrize(
    ("begin", "how"),
    [
        (Runtime.agenerate, "cancelled"),
        *((begin, how) for begin in (Runtime.astream, Runtime.stream) for how in ("left", "forgotten")),
    ],
)
def test_a_text_that_nobody_reads_any_more_ends_with_the_step_under_way(begin: Callable[..., Any], how: str) -> None:
    runtime, engine = stepwise_runtime(ENDLESS)

    async def give_up() -> None:
        reading = begin(runtime, [1, 2, 3], PLAIN)
        if how == "cancelled":
            reading = asyncio.create_task(reading)
        await asyncio.to_thread(engine.wait)
        second = runtime.stream([4, 5], Decoding(max_tokens=4))
        await asyncio.to_thread(engine.step)
        if how == "cancelled":
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        elif how == "forgotten":
            del reading
            gc.collect()
        elif begin == Runtime.astream:
            async with reading:
                await anext(reading)
        else:
            with reading:
                next(reading)
        assert second.statistics.waiting_seconds == 0.0
        await asyncio.to_thread(engine.step)  # the last of the first text
        assert second.statistics.waiting_seconds > 0
        engine.go()
        assert second.completion().tokens == tuple(ENDLESS.write([4, 5], 4))
        if how == "left":  # the token of the step that was over, and the one of the step under way
            found = await reading.completion() if begin == Runtime.astream else reading.completion()
            assert (found.ending, found.tokens) == ("cancelled", tuple(ENDLESS.write([1, 2, 3], 2)))

    with runtime:
        within_a_minute(give_up())


def test_reading_a_failed_request_raises_its_error_once() -> None:
    runtime, engine = stepwise_runtime(ENDLESS)
    with runtime:
        engine.broken = True
        engine.go()

        with pytest.raises(EngineFault, match="the fake engine failed"):
            within_a_minute(runtime.agenerate([1, 2, 3], PLAIN))
        stream = runtime.stream([1, 2, 3], PLAIN)
        with pytest.raises(EngineFault, match="the fake engine failed"):
            next(stream)
        assert list(stream) == []
        with pytest.raises(EngineFault):
            stream.completion()
        engine.broken = False
        assert runtime.generate([1, 2, 3], PLAIN).tokens == tuple(ENDLESS.write([1, 2, 3], 61))


def test_a_loop_that_ends_before_its_texts_do_ends_them_and_hurts_nobody() -> None:
    runtime, engine = stepwise_runtime(ENDLESS, requests=2)
    with runtime:
        kept: list[AsyncStream] = []

        async def begin() -> None:
            kept.append(runtime.astream([1, 2, 3], PLAIN))
            await asyncio.to_thread(engine.wait)

        within_a_minute(begin())  # the loop is closed now: nobody can read on
        second = runtime.stream([4, 5], PLAIN)
        engine.go()
        assert second.completion().tokens == tuple(ENDLESS.write([4, 5], 62))
    assert kept[0].statistics.tokens < 10


def test_a_timeout_counts_from_the_call(gate: Gate) -> None:
    with hash_runtime(ENDLESS) as runtime, ThreadPoolExecutor(1) as pool:
        found = pool.submit(runtime.generate, "abc", Decoding(timeout=0.01))
        assert gate.began.acquire(timeout=60)
        sleep(0.05)
        gate.go()
        assert found.result(60).ending == "deadline"


LOCKED = """
import os, sys, warnings
warnings.simplefilter("ignore")
from spaceport.runtime import Decoding, RuntimeClosed
from support.hash_engine import Language
from support.hash_runtime import hash_runtime

runtime = hash_runtime(Language(3, end_every=10**9), max_seq_len=3000)
stream = runtime.stream([1, 2], Decoding(mask_slots=0))
next(stream)
locks = [runtime._worker._change, runtime._worker._scheduler.queue._lock, stream._reading]
for lock in locks:  # as another OS thread may hold them at the fork
    lock.acquire()
if os.fork() == 0:
    uses = [
        lambda: runtime.generate([1]), lambda: runtime.stream("ab"), lambda: runtime.score([1, 2]), runtime.status,
        lambda: next(stream), stream.completion,
    ]
    errors = 0
    for use in uses:
        try:
            use()
        except RuntimeClosed as error:
            errors += "forked from: open it here" in str(error)
    runtime.close()
    print(errors, "of", len(uses), flush=True)
    sys.exit(0)  # with everything that runs at exit
for lock in locks:
    lock.release()
print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
runtime.close()
"""


def test_a_forked_process_gets_errors_instead_of_waiting_for_locks() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    environment["PYTHONPATH"] = str(ROOT / "tests")
    command = [sys.executable, "-c", LOCKED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert (done.stdout, done.stderr) == ("6 of 6\n0\n", "")
