"""The status counts requests, slots and tokens at the moment at which it is asked for."""

from __future__ import annotations

import logging

import pytest

from spaceport.runtime.decode.draft import REASONS
from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import EngineFault
from spaceport.runtime.scheduling.status import STOPPED_AFTER, DraftLog, RuntimeStatus, TokenMeter
from support.hash_engine import Language
from support.hash_runtime import hash_runtime
from support.stepwise_engine import stepwise_runtime

ENDLESS = Language(3, end_every=10**9)  # goes on to its limit
PLAIN = Decoding(max_tokens=5, mask_slots=0)


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_idle_runtime_has_no_heartbeat_and_nothing_active() -> None:
    with hash_runtime(ENDLESS, requests=3) as runtime:
        status = runtime.status()
        capacity = runtime.engine.capacity
    assert status == RuntimeStatus(True, False, 0, 3, 0, 256, 0, 3 * capacity, None, 0, 0.0, 0, 0)


def test_a_busy_runtime_counts_requests_slots_and_tokens() -> None:
    runtime, engine = stepwise_runtime(ENDLESS)
    with runtime:
        streams = [runtime.stream([1, 2, 3], PLAIN), runtime.stream([4], PLAIN)]
        engine.wait()
        engine.step()
        engine.step()
        status = runtime.status()
        assert (status.active_requests, status.queued_requests, status.tokens) == (1, 1, 2)
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


def test_the_log_is_silent_by_default() -> None:
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("spaceport").handlers)


def entries_of(caplog: pytest.LogCaptureFixture, *requests: Statistics) -> list[str]:
    """What is logged once these requests have ended, one after the other."""
    log = DraftLog()
    with caplog.at_level(logging.INFO, "spaceport.runtime"):
        for request in requests:
            log.add(request)
    return [entry.getMessage() for entry in caplog.records]


def without_drafts(**limited: int) -> Statistics:
    """The statistics of a request that drafted nothing, with its steps by reason."""
    return Statistics(drafts_limited=limited)


DRAFTED = Statistics(mask_rows=1, drafts_limited={"row_limit": 1})


def test_the_log_says_once_that_drafts_have_stopped_and_once_that_they_resume(
    caplog: pytest.LogCaptureFixture,
) -> None:
    idle = without_drafts(budget=STOPPED_AFTER)
    stopped = f"nothing was drafted in {STOPPED_AFTER} steps: {REASONS['budget']}"
    resumed = f"drafts resumed after {2 * STOPPED_AFTER} steps"
    assert entries_of(caplog, idle, idle, DRAFTED, DRAFTED, idle) == [stopped, resumed, stopped]


def test_the_log_names_the_usual_reason_of_all_requests_without_drafts(caplog: pytest.LogCaptureFixture) -> None:
    requests = [
        without_drafts(budget=90, not_worth_it=60),
        without_drafts(no_candidates=5, not_worth_it=STOPPED_AFTER - 155),
    ]
    assert entries_of(caplog, *requests) == [f"nothing was drafted in 256 steps: {REASONS['not_worth_it']}"]


def test_the_log_says_nothing_before_enough_steps_in_a_row_had_no_drafts(caplog: pytest.LogCaptureFixture) -> None:
    idle = without_drafts(budget=STOPPED_AFTER - 1)
    assert entries_of(caplog, idle, DRAFTED, idle, DRAFTED) == []


def test_a_request_that_asks_for_no_drafts_does_not_count_as_one_without(caplog: pytest.LogCaptureFixture) -> None:
    """It neither adds steps nor ends a time without drafts."""
    idle, plain = without_drafts(budget=STOPPED_AFTER // 2), Statistics(steps=10_000, rows=10_000)
    assert entries_of(caplog, plain, idle, plain, idle, plain) == [
        f"nothing was drafted in {STOPPED_AFTER} steps: {REASONS['budget']}"
    ]


def test_a_runtime_logs_that_nothing_is_drafted_where_rows_are_expensive(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "spaceport"), hash_runtime(ENDLESS, max_seq_len=400, row=5.0) as runtime:
        for _ in range(2):
            runtime.generate([1, 2, 3], Decoding(max_tokens=300))
        runtime.generate([1, 2, 3], Decoding(max_tokens=300, mask_slots=0, lookup=0))
    drafts, closed = [entry.getMessage() for entry in caplog.records]
    assert drafts == f"nothing was drafted in 300 steps: {REASONS['budget']}"
    assert closed.startswith("closed ")
