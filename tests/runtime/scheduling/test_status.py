"""The status counts requests, slots and tokens at this moment; the log names their ends; the watchdog sees long calls."""

from __future__ import annotations

import logging
from threading import Event

import pytest

from spaceport.runtime.decode.draft import REASONS
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import EngineFault
from spaceport.runtime.scheduling.progress import STOPPED_AFTER, DraftLog, Heartbeat, TokenMeter
from spaceport.runtime.scheduling.worker import RuntimeStatus, Watchdog
from support.hash_engine import Language
from support.hash_runtime import hash_runtime, stepwise_runtime

ENDLESS = Language(3, end_every=10**9)  # goes on to its limit
PLAIN = Decoding(max_tokens=5, mask_slots=0)


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


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
    clock = Clock()
    meter = TokenMeter(clock)
    for _ in range(300):
        clock.now += 0.1
        meter.add(2)
    assert meter.tokens == 600
    assert meter.tokens_per_second == pytest.approx(20, rel=0.1)
    clock.now += 5
    assert meter.tokens_per_second == pytest.approx(10, rel=0.2)
    clock.now += 20
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


def without_drafts(steps: int, threads: int = 1) -> Statistics:
    """The statistics of a request that drafted nothing in any thread."""
    return Statistics(steps=steps, drafts_limited={"budget": steps * threads})


IDLE, HALF = without_drafts(STOPPED_AFTER), without_drafts(STOPPED_AFTER // 2)
LESS, PLAIN_ONE = without_drafts(STOPPED_AFTER - 1, threads=16), Statistics(steps=10_000, rows=10_000)
DRAFTED = Statistics(mask_rows=1, drafts_limited={"row_limit": 1})
STOPPED = f"the last request with {STOPPED_AFTER} steps drafted nothing: "


@pytest.mark.parametrize(
    ("requests", "entries"),
    [
        (
            [IDLE, IDLE, DRAFTED, DRAFTED, IDLE],  # once that they stopped, once that they resumed
            [
                STOPPED + REASONS["budget"],
                f"drafts resumed: the 2 requests with {2 * STOPPED_AFTER} steps before drafted nothing",
                STOPPED + REASONS["budget"],
            ],
        ),
        ([LESS, DRAFTED, LESS, DRAFTED], []),  # too few in a row
        # one that asks for no drafts neither adds steps nor ends a time without drafts
        (
            [PLAIN_ONE, HALF, PLAIN_ONE, HALF, PLAIN_ONE],
            [f"the last 2 requests with {STOPPED_AFTER} steps drafted nothing: {REASONS['budget']}"],
        ),
    ],
)
def test_the_log_says_when_drafts_stop_and_resume(
    requests: list[Statistics], entries: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = DraftLog()
    with caplog.at_level(logging.INFO, "spaceport.runtime"):
        for request in requests:
            log.add(request)
    assert [entry.getMessage() for entry in caplog.records] == entries


def test_a_heartbeat_that_is_too_old_is_reported_once_and_not_at_rest() -> None:
    clock = Clock()
    heartbeat = Heartbeat(clock)
    ages = [heartbeat.age]
    heartbeat.beat()
    clock.now += 2.5
    ages.append(heartbeat.age)
    heartbeat.beat()
    assert [*ages, heartbeat.age] == [None, 2.5, 0]
    reported: list[float] = []
    seen = Event()

    def report(age: float) -> None:
        reported.append(age)
        seen.set()

    watchdog = Watchdog(heartbeat, 0.01, report)
    watchdog.start()
    assert not seen.wait(0.05)  # young enough
    clock.now += 3
    assert seen.wait(60)
    watchdog._thread.join(60)
    assert reported == [3.0]
    heartbeat.rest()
    assert heartbeat.age is None
