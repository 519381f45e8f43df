"""Texts under asyncio and in forked processes: gathered, streamed, cancelled, left early, and refused at once."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Coroutine
from time import sleep
from typing import Any, TypeVar

import pytest

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import EngineFault
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.scheduling.stream import AsyncStream
from spaceport.runtime.text.prompt import Prompt, PromptEncoder
from support.hash_engine import Language
from support.hash_runtime import StepwiseEngine, hash_runtime, stepwise_runtime
from support.paths import ROOT

ENDLESS = Language(3, end_every=10**9)  # goes on to its limit
PLAIN = Decoding(mask_slots=0)
T = TypeVar("T")


def within_a_minute(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


async def step(engine: StepwiseEngine) -> None:
    await asyncio.to_thread(engine.step)


def test_a_cancelled_call_ends_its_text_with_the_step_under_way() -> None:
    runtime, engine = stepwise_runtime(ENDLESS)
    with runtime:

        async def cancel() -> Completion:
            first = asyncio.create_task(runtime.agenerate([1, 2, 3], PLAIN))
            await asyncio.to_thread(engine.wait)
            second = runtime.astream([4, 5], Decoding(max_tokens=4))
            await step(engine)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert second.statistics.waiting_seconds == 0.0
            await step(engine)  # the last of the first text
            assert second.statistics.waiting_seconds > 0
            engine.go()
            return await second.completion()

        assert within_a_minute(cancel()).tokens == tuple(ENDLESS.write([4, 5], 4))


def test_leaving_the_block_early_ends_the_text() -> None:
    runtime, engine = stepwise_runtime(ENDLESS)
    with runtime:

        async def leave() -> Completion:
            async with runtime.astream([1, 2, 3], PLAIN) as stream:
                await asyncio.to_thread(engine.wait)
                await step(engine)
                async for _ in stream:
                    break
            engine.leave.release()
            return await stream.completion()

        found = [within_a_minute(leave())]
        with runtime.stream([1, 2, 3], PLAIN) as stream:
            engine.wait()
            engine.step()
            next(stream)
        engine.go()
        found.append(stream.completion())
    for one in found:  # the token of the step that was over, and the one of the step under way
        assert (one.ending, one.tokens) == ("cancelled", tuple(ENDLESS.write([1, 2, 3], 2)))


def test_a_stream_that_nobody_holds_ends_its_text() -> None:
    runtime, engine = stepwise_runtime(ENDLESS)
    with runtime:

        async def forget() -> Completion:
            async for _ in start():
                break
            gc.collect()
            second = asyncio.create_task(runtime.agenerate([4], Decoding(max_tokens=2)))
            engine.go()
            return await second

        def start() -> AsyncStream:
            stream = runtime.astream([1, 2, 3], PLAIN)
            engine.wait()
            engine.step()
            return stream

        assert within_a_minute(forget()).tokens == tuple(ENDLESS.write([4], 2))


def test_reading_a_failed_request_raises_its_error_once() -> None:
    runtime, engine = stepwise_runtime(ENDLESS)
    with runtime:
        engine.broken = True
        engine.go()

        async def read() -> None:
            async for _ in runtime.astream([1, 2, 3], PLAIN):
                pass

        for reading in (
            lambda: list(runtime.stream([1, 2, 3], PLAIN)),
            lambda: within_a_minute(read()),
            lambda: within_a_minute(runtime.agenerate([1, 2, 3], PLAIN)),
        ):
            with pytest.raises(EngineFault, match="the fake engine failed"):
                reading()
        stream = runtime.stream([1, 2, 3], PLAIN)
        with pytest.raises(EngineFault):
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


def test_a_timeout_counts_from_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens_of = PromptEncoder.tokens_of

    def slow(self: PromptEncoder, prompt: Prompt, parse_special: bool = False, **others: Any) -> list[int]:
        sleep(0.05)
        return tokens_of(self, prompt, parse_special, **others)

    monkeypatch.setattr(PromptEncoder, "tokens_of", slow)
    with hash_runtime(ENDLESS) as runtime:
        assert within_a_minute(runtime.agenerate("abc", Decoding(timeout=0.01))).ending == "deadline"
        assert runtime.generate("abc", Decoding(timeout=0.01)).ending == "deadline"


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


def printed(program: str) -> tuple[str, str]:
    """What a program prints and reports."""
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    return done.stdout, done.stderr


def test_a_forked_process_gets_errors_instead_of_waiting_for_locks() -> None:
    assert printed(LOCKED) == ("6 of 6\n0\n", "")
