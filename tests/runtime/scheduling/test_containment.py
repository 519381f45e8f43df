"""Faults stay with the request that they belong to: NaN in KV slots, calls that do not return, and slow readers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from threading import enumerate as enumerate_threads

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch, EngineFault
from spaceport.runtime.scheduling.stream import Stream
from spaceport.runtime.scheduling.worker import RuntimeClosed
from spaceport.runtime.session import Runtime
from support.hash_engine import Language
from support.hash_runtime import SlowEngine, hash_runtime
from support.spoilt_engine import spoilt_runtime

ENDLESS = Language(3, end_every=10**9)  # goes on to its limit


def test_nan_of_a_cancelled_prompt_does_not_reach_the_next_request_of_a_session(tiny_bundle: Path) -> None:
    opened: SimpleQueue[Stream] = SimpleQueue()
    begun = Event()  # the prompt that is cancelled

    def overflow(batch: Batch, logits: NDArray[np.float32]) -> None:
        """The first chunk leaves NaN behind, as a kernel does that overflows."""
        if begun.is_set():
            begun.clear()
            engine.inner._kv[:, batch.first, :, batch.slot_ids[0, -1]] = np.nan  # type: ignore[attr-defined]
            opened.get().close()

    runtime, engine = spoilt_runtime(tiny_bundle, overflow, prompt_rows=8)
    with runtime:
        expected = runtime.generate([3, 2, 1], Decoding(max_tokens=8, mask_slots=0)).tokens
        begun.set()
        stream = runtime.stream(list(range(40)), Decoding(max_tokens=8, mask_slots=0))
        opened.put(stream)
        assert stream.completion().ending == "cancelled"
        assert runtime.generate([3, 2, 1], Decoding(max_tokens=8, mask_slots=0)).tokens == expected


def test_requests_of_a_call_that_does_not_return_fail_and_the_runtime_is_unhealthy() -> None:
    runtime, engine = blocked_runtime(call_timeout=0.2)
    streams = [runtime.stream([number], Decoding(max_tokens=9)) for number in range(3)]  # one of them waits
    for stream in streams:
        with pytest.raises(
            EngineFault, match=r"has not returned for \d+\.\d s, call_timeout is 0.2 s: open the bundle"
        ):
            stream.completion()
    status = runtime.status()
    assert (status.healthy, status.failed_requests, status.queued_requests) == (False, 3, 0)
    with pytest.raises(EngineFault, match="open the bundle again"):
        runtime.generate([1])
    runtime.close()
    engine.leave.set()  # the call returns after all
    wait_for(lambda: not workers())
    assert engine.calls == 1  # and no other follows


def test_closing_with_a_time_limit_returns_while_a_call_does_not() -> None:
    runtime, engine = blocked_runtime(call_timeout=None)
    stream = runtime.stream([1, 2], Decoding(max_tokens=9))
    engine.began.wait(60)
    runtime.close(timeout=0.1)
    with pytest.raises(RuntimeClosed, match=r"an engine call did not return within 0\.1 s"):
        stream.completion()
    with pytest.raises(RuntimeClosed, match="the runtime is closed"):
        runtime.generate([1])
    status = runtime.status()
    assert (status.closed, status.healthy) == (True, False)
    runtime.close()
    engine.leave.set()
    wait_for(lambda: not workers())


def test_a_failed_call_that_returned_too_late_changes_nothing() -> None:
    runtime, engine = blocked_runtime(call_timeout=0.1)
    engine.requests = 0  # the call raises once it returns
    stream = runtime.stream([1, 2], Decoding(max_tokens=9))
    with pytest.raises(EngineFault, match="has not returned"):
        stream.completion()
    engine.leave.set()
    wait_for(lambda: not workers())
    with pytest.raises(EngineFault, match="has not returned"):
        stream.completion()


def test_a_request_pauses_while_its_reader_is_slow_and_others_go_on() -> None:
    with hash_runtime(ENDLESS, max_seq_len=128, requests=2) as runtime:
        stream = runtime.stream([1, 2, 3], Decoding(max_tokens=100, mask_slots=0, lookup=0))
        stream._submission.submitted.unread_limit = 20
        assert runtime.generate([4], Decoding(max_tokens=90)).tokens == tuple(ENDLESS.write([4], 90))
        wait_for(lambda: stream._submission.submitted.paused)
        unread = stream._submission.submitted.delivered
        time.sleep(0.05)
        assert 20 <= stream._submission.submitted.delivered == unread < 100
        assert [piece.token for piece in stream] == ENDLESS.write([1, 2, 3], 100)


def test_a_paused_request_still_reaches_its_deadline_and_can_be_cancelled() -> None:
    with hash_runtime(ENDLESS, max_seq_len=128, requests=2) as runtime:
        late = runtime.stream([1], Decoding(timeout=0.5))
        closed = runtime.stream([2])
        for stream in (late, closed):
            stream._submission.submitted.unread_limit = 5
        wait_for(lambda: late._submission.submitted.done)
        wait_for(lambda: closed._submission.submitted.paused)
        closed.close()
        assert [stream.completion().ending for stream in (late, closed)] == ["deadline", "cancelled"]


def test_a_paused_request_does_not_delay_closing() -> None:
    runtime = hash_runtime(ENDLESS, max_seq_len=128)
    stream = runtime.stream([1])
    stream._submission.submitted.unread_limit = 5
    wait_for(lambda: stream._submission.submitted.paused)
    runtime.close()
    with pytest.raises(RuntimeClosed):
        stream.completion()


def blocked_runtime(call_timeout: float | None) -> tuple[Runtime, SlowEngine]:
    """A runtime for two requests whose calls do not return until they are allowed to."""
    like = hash_runtime(ENDLESS)
    engine = SlowEngine(ENDLESS, like.engine.capacity, 2)
    return Runtime(like.bundle, engine, like.max_seq_len, call_timeout=call_timeout), engine


def workers() -> list[str]:
    return [thread.name for thread in enumerate_threads() if thread.name.startswith("spaceport")]


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")
