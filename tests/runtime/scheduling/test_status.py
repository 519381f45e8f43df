"""The status counts requests, slots and tokens at this moment; the log names the ends of requests."""

from __future__ import annotations

import logging
import time

import pytest

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import EngineFault
from spaceport.runtime.scheduling.scheduler import TokenMeter
from spaceport.runtime.scheduling.worker import RuntimeStatus
from support.hash_engine import Language
from support.hash_runtime import hash_runtime, stepwise_runtime

ENDLESS = Language(3, end_every=10**9)  # goes on to its limit
PLAIN = Decoding(max_tokens=5, mask_slots=0)


def test_a_runtime_counts_requests_slots_and_tokens() -> None:
    with hash_runtime(ENDLESS, requests=3) as idle:
        capacity = idle.engine.capacity
        assert idle.status() == RuntimeStatus(True, False, 0, 3, 0, 256, 0, 3 * capacity, None, 0, 0.0, 0, 0)
    runtime, engine = stepwise_runtime(ENDLESS)
    with runtime:
        streams = [runtime.stream([1, 2, 3], PLAIN), runtime.stream([4], PLAIN)]
        engine.wait()
        engine.step()
        engine.step()
        status = runtime.status()
        assert (status.active_requests, status.queued_requests, status.tokens) == (1, 1, 2)
        assert (status.live_threads, status.queued_threads) == (1, 0)
        assert 3 <= status.kv_slots_used <= 5
        assert status.heartbeat_age is not None
        assert 0 <= status.heartbeat_age < 60
        engine.go()
        for stream in streams:
            stream.completion()
    status = runtime.status()
    assert (status.closed, status.tokens, status.ended_requests, status.failed_requests) == (True, 10, 2, 0)
    assert status.tokens_per_second > 0


def test_tokens_per_second_are_those_of_the_last_ten_seconds() -> None:
    now = 100.0
    meter = TokenMeter(lambda: now)
    for _ in range(300):
        now += 0.1
        meter.add(2)
    assert meter.tokens == 600
    assert meter.tokens_per_second == pytest.approx(20, rel=0.1)
    now += 5
    assert meter.tokens_per_second == pytest.approx(10, rel=0.2)
    now += 20
    assert meter.tokens_per_second == 0


def test_the_log_names_requests_and_their_endings_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("spaceport").handlers)
    runtime, engine = stepwise_runtime(ENDLESS)
    with caplog.at_level(logging.DEBUG, "spaceport"), runtime:
        stream = runtime.stream("abcabc", PLAIN)
        engine.wait()
        engine.go()
        stream.completion()
        engine.broken = True
        with pytest.raises(EngineFault):
            runtime.generate("fghij", PLAIN)
    entries = [entry.getMessage() for entry in caplog.records]
    assert [entry.name for entry in caplog.records] == ["spaceport.runtime"] * 3
    assert "ended (length): 6 prompt tokens, 5 tokens in 5 steps" in entries[0]
    assert entries[1].endswith("failed: EngineFault")
    assert entries[2].startswith("closed ")
    assert not any(text in entry for entry in entries for text in ("abcabc", "fghij"))


def test_a_runtime_at_rest_is_healthy_for_longer_than_a_call_may_take() -> None:
    with hash_runtime(ENDLESS, call_timeout=0.5) as runtime:
        runtime.generate([1], PLAIN)
        time.sleep(0.8)
        assert (runtime.status().healthy, runtime.status().heartbeat_age) == (True, None)
