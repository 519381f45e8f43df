"""The worker: texts of many OS threads, that end with their readers, in time, with the runtime, or in a lost call; its status."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spaceport.runtime.decode.sequence import TokenSequence
from spaceport.runtime.decode.sequence_group import SequenceGroup
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import EngineFault
from spaceport.runtime.scheduling.prefix_cache import FreeBuffers
from spaceport.runtime.scheduling.request import Completion, Request
from spaceport.runtime.scheduling.scheduler import TokenMeter
from spaceport.runtime.scheduling.worker import RuntimeClosed, RuntimeStatus
from spaceport.runtime.text.transcript import Piece, Transcript
from support.hash_engine import END, FORK, Language
from support.hash_runtime import close_between_steps, hash_runtime, stepwise_runtime

ENDLESS = Language(3, end_every=10**9)  # goes on to its limit
PLAIN = Decoding(mask_slots=0)


@pytest.fixture
def workers() -> Callable[[], list[threading.Thread]]:
    """A function for the OS threads of runtimes, without those that earlier tests left: they end after a while."""
    earlier = threading.enumerate()
    return lambda: [
        thread for thread in threading.enumerate() if thread.name.startswith("spaceport") and thread not in earlier
    ]


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


def alive() -> int:
    """Requests and threads that anybody still holds."""
    gc.collect()
    # by type() and not isinstance(), which asks some objects of other libraries for a deprecated class
    return sum(type(thing) in (Request, SequenceGroup, TokenSequence) for thing in gc.get_objects())


@pytest.mark.slow
def test_a_hundred_requests_over_eight_slots_equal_each_alone_and_leave_nothing_behind() -> None:
    language, random = Language(11, 70, end_every=30, fork_every=12), np.random.default_rng(0)
    threads: list[dict[str, Any]] = [{"max_threads": 16, "max_depth": 2}, {"max_threads": 1}, {"max_depth": 0}]
    drafts: list[dict[str, Any]] = [{"draft": "chain"}, {"lookup": 4}, {"mask_slots": 0}, {}]
    prompts = [random.integers(0, END, random.integers(1, 80)).tolist() for _ in range(100)]
    with hash_runtime(language, max_seq_len=128, max_slots=800, requests=8) as runtime, ThreadPoolExecutor(40) as pool:

        def serve(number: int) -> Completion:
            options = {**threads[number % 3], **drafts[number % 4], "max_tokens": 1 + number % 39}
            timeout = number / 1000 if number % 7 == 6 else None
            with runtime.stream(prompts[number], Decoding(max_total_tokens=600, timeout=timeout, **options)) as stream:
                if number % 5 == 4:
                    for _, _ in zip(range(number % 20), stream, strict=False):
                        pass
                    stream.close()
                return stream.completion()

        before = alive()
        found = list(pool.map(serve, range(100)))
        for number, (prompt, completion) in enumerate(zip(prompts, found, strict=True)):
            depth = threads[number % 3].get("max_depth", Decoding().max_depth)
            alone = language.tree(prompt, len(prompt) + 1 + number % 39, depth)
            written = {thread.path: list(thread.tokens) for thread in completion.threads}
            if completion.ending in ("cancelled", "deadline"):
                assert number % 5 == 4 or number % 7 == 6
                assert all(alone[path][: len(tokens)] == tokens for path, tokens in written.items())
            else:
                assert written == alone
                assert len(completion.tokens) == sum(token != FORK for tokens in alone.values() for token in tokens)
        assert {completion.ending for completion in found} >= {"end", "length", "cancelled"}
        assert alive() == before


@pytest.mark.parametrize("options", [{}, {"draft": "chain"}, {"max_threads": 4}, {"mask_slots": 0, "logprobs": 2}])
def test_text_made_by_the_reader_has_the_pieces_of_text_made_by_the_worker(options: dict[str, Any]) -> None:
    """Text is made where it is read unless a stop string may end it; no text of these networks holds zz."""
    for seed in range(3):
        found: list[list[Piece]] = []
        with hash_runtime(Language(seed), max_seq_len=100, max_slots=200) as runtime:
            for stop in ((), "zz"):
                with runtime.stream([1, 2, 3], Decoding(stop=stop, **options)) as stream:
                    found.append(list(stream))
                    assert "".join(piece.reading for piece in found[-1]) == stream.completion().text
        assert found[0] == found[1]


def test_a_total_reached_behind_a_stop_string_does_not_end_the_text() -> None:
    """A thread behind the stop string ended with the total in the same step; it is no part of the text."""
    language = Language(8, 70, end_every=30, fork_every=6)
    decoding = Decoding(max_total_tokens=20, stop="a", max_threads=16, max_depth=2, draft="chain")
    with (
        hash_runtime(language, max_seq_len=128, max_slots=400) as runtime,
        runtime.stream([1, 2, 3], decoding) as stream,
    ):
        completion = stream.completion()
    assert "total" in {thread.ending for thread in stream.request.sequences.threads}
    assert {thread.ending for thread in completion.threads} == {"stop"}
    assert completion.ending == "stop"


def test_text_that_cannot_be_made_fails_where_it_is_read_behind_the_pieces_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_token, tokens, tried = Transcript.on_token, ENDLESS.write([1, 2], 9), list[int]()
    decoding = Decoding(max_tokens=9, mask_slots=0, lookup=0)

    def refuse_sixth(self: Transcript, thread: TokenSequence, token: int, *others: Any) -> bool:
        if token == tokens[5]:
            tried.append(token)
            raise ValueError("no text")
        return on_token(self, thread, token, *others)

    with hash_runtime(ENDLESS) as runtime:
        with monkeypatch.context() as patch:
            patch.setattr(Transcript, "on_token", refuse_sixth)
            with pytest.raises(ValueError, match="no text"):
                asyncio.run(runtime.agenerate([1, 2], decoding))
            stream = runtime.stream([1, 2], decoding)
            wait_for(lambda: stream.request.done)  # all steps are unread
            assert [next(stream).token for _ in range(5)] == tokens[:5]
            with pytest.raises(ValueError, match="no text"):
                next(stream)
            with pytest.raises(ValueError, match="no text"):
                stream.request.completion()
        assert len(tried) == 2
        assert runtime.generate([1, 2], decoding).tokens == tuple(tokens)


def test_closing_ends_every_text_and_leaves_no_os_thread(workers: Callable[[], list[threading.Thread]]) -> None:
    runtime, engine = stepwise_runtime(ENDLESS, requests=2)
    streams = [runtime.stream([1, 2, number], PLAIN) for number in range(4)]  # two of them wait
    engine.wait()
    for _ in range(6):
        engine.step()
    with ThreadPoolExecutor(3) as pool:
        texts = [pool.submit(stream.completion) for stream in streams[1:]]
        close_between_steps(runtime, engine)
        for text in texts:
            with pytest.raises(RuntimeClosed, match="the runtime was closed before the completion ended"):
                text.result(60)
    # what was written before can be read
    assert [next(streams[0]).token for _ in range(3)] == ENDLESS.write([1, 2, 0], 3)
    with pytest.raises(RuntimeClosed):
        streams[0].completion()
    assert not workers()
    with pytest.raises(RuntimeClosed, match="the runtime is closed"):
        runtime.stream([1])
    runtime.close()


def test_a_request_fails_once_if_its_reader_gives_it_up_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage stream waits for no lock: its wish may be written after the scheduler has noted the failure."""
    runtime, engine = stepwise_runtime(ENDLESS, requests=2)
    abandon = SequenceGroup.abandon

    def abandon_late(sequences: SequenceGroup) -> None:
        abandon(sequences)
        streams[0].request.asked = "cancelled"

    monkeypatch.setattr(SequenceGroup, "abandon", abandon_late)
    streams = [runtime.stream([1, 2, 3]), runtime.stream([4])]
    engine.wait()
    engine.broken = True
    engine.go()
    for stream in streams:
        with pytest.raises(EngineFault, match="the fake engine failed"):
            stream.completion()
    status = runtime.status()
    assert (status.ended_requests, status.failed_requests, status.active_requests) == (2, 2, 0)
    runtime.close()


def test_a_reader_that_is_interrupted_leaves_the_runtime_as_it_was() -> None:
    runtime, engine = stepwise_runtime(ENDLESS)
    with runtime:

        def interrupt() -> None:
            engine.wait()
            engine.step()
            time.sleep(0.05)  # by now the reader waits for the next piece
            os.kill(os.getpid(), signal.SIGINT)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                runtime.generate([1, 2, 3], PLAIN)
        engine.go()
        assert runtime.generate([4, 5], Decoding(max_tokens=9)).tokens == tuple(ENDLESS.write([4, 5], 9))


@pytest.mark.parametrize("raises", [False, True])
def test_requests_of_a_call_that_does_not_return_fail_and_the_runtime_is_unhealthy(
    raises: bool, workers: Callable[[], list[threading.Thread]]
) -> None:
    runtime, engine = stepwise_runtime(ENDLESS, 2, call_timeout=0.2)
    streams = [runtime.stream([number], Decoding(max_tokens=9)) for number in range(3)]  # one of them waits
    expected = r"has not returned for \d+\.\d s, call_timeout is 0.2 s: open the bundle again"
    for stream in streams:
        with pytest.raises(EngineFault, match=expected):
            stream.completion()
    status = runtime.status()
    assert (status.healthy, status.failed_requests, status.queued_requests) == (False, 3, 0)
    with pytest.raises(EngineFault, match="open the bundle again"):
        runtime.generate([1])
    if raises:
        runtime.engine.requests = 0  # the call raises once it returns
    runtime.close()
    engine.go()  # the call returns after all
    wait_for(lambda: not workers())
    assert runtime.engine.calls == 1  # and no other follows
    with pytest.raises(EngineFault, match="has not returned"):
        streams[0].completion()


def test_closing_with_a_time_limit_returns_while_a_call_does_not(workers: Callable[[], list[threading.Thread]]) -> None:
    runtime, engine = stepwise_runtime(ENDLESS, 2, call_timeout=None)
    stream = runtime.stream([1, 2], Decoding(max_tokens=9))
    engine.wait()
    runtime.close(timeout=0.1)
    with pytest.raises(RuntimeClosed, match=r"an engine call did not return within 0\.1 s"):
        stream.completion()
    with pytest.raises(RuntimeClosed, match="the runtime is closed"):
        runtime.generate([1])
    assert (runtime.status().closed, runtime.status().healthy) == (True, False)
    runtime.close()
    engine.go()
    wait_for(lambda: not workers())


def test_closing_with_a_time_limit_fails_a_request_between_the_queue_and_its_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, engine = stepwise_runtime(ENDLESS, 2, call_timeout=None)
    engine.go()
    take, taken, closed = FreeBuffers.take, threading.Event(), threading.Event()

    def take_late(buffers: FreeBuffers, sequences: SequenceGroup, running: Collection[int]) -> int:
        taken.set()
        assert closed.wait(60)
        return take(buffers, sequences, running)

    monkeypatch.setattr(FreeBuffers, "take", take_late)
    with runtime.stream([1, 2], Decoding(max_tokens=9)) as stream:
        assert taken.wait(60)
        runtime.close(timeout=0.01)
        closed.set()
        wait_for(lambda: stream.request.done)
        with pytest.raises(RuntimeClosed, match="an engine call did not return within"):
            stream.completion()
    assert runtime.status().failed_requests == 1


def test_a_request_pauses_while_its_reader_is_slow_and_others_go_on() -> None:
    with hash_runtime(ENDLESS, max_seq_len=128, requests=2) as runtime:
        stream = runtime.stream([1, 2, 3], Decoding(max_tokens=100, mask_slots=0, lookup=0))
        stream.request.unread_limit = 20
        assert runtime.generate([4], Decoding(max_tokens=90)).tokens == tuple(ENDLESS.write([4], 90))
        wait_for(lambda: stream.request.paused)
        unread = stream.request._delivered
        time.sleep(0.05)
        assert 20 <= stream.request._delivered == unread < 100
        assert [piece.token for piece in stream] == ENDLESS.write([1, 2, 3], 100)


def test_a_paused_request_can_reach_its_deadline_be_cancelled_and_be_closed() -> None:
    runtime = hash_runtime(ENDLESS, max_seq_len=128, requests=3)
    late, cancelled, closed = streams = [runtime.stream([1], Decoding(timeout=each)) for each in (0.5, None, None)]
    for stream in streams:
        stream.request.unread_limit = 5
    wait_for(lambda: late.request.done)
    wait_for(lambda: cancelled.request.paused and closed.request.paused)
    cancelled.close()
    assert [stream.completion().ending for stream in (late, cancelled)] == ["deadline", "cancelled"]
    runtime.close()
    with pytest.raises(RuntimeClosed):
        closed.completion()


# Status and log

FIVE = Decoding(max_tokens=5, mask_slots=0)


def test_a_runtime_counts_requests_slots_and_tokens() -> None:
    with hash_runtime(ENDLESS, requests=3) as idle:
        capacity = idle.engine.capacity
        assert idle.status() == RuntimeStatus(True, False, 0, 3, 0, 256, 0, 3 * capacity, None, 0, 0.0, 0, 0)
    runtime, engine = stepwise_runtime(ENDLESS)
    with runtime:
        streams = [runtime.stream([1, 2, 3], FIVE), runtime.stream([4], FIVE)]
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
        stream = runtime.stream("abcabc", FIVE)
        engine.wait()
        engine.go()
        stream.completion()
        engine.broken = True
        with pytest.raises(EngineFault):
            runtime.generate("fghij", FIVE)
    entries = [entry.getMessage() for entry in caplog.records]
    assert [entry.name for entry in caplog.records] == ["spaceport.runtime"] * 3
    assert "ended (length): 6 prompt tokens, 5 tokens in 5 steps" in entries[0]
    assert entries[1].endswith("failed: EngineFault")
    assert entries[2].startswith("closed ")
    assert not any(text in entry for entry in entries for text in ("abcabc", "fghij"))


def test_a_runtime_at_rest_is_healthy_for_longer_than_a_call_may_take() -> None:
    with hash_runtime(ENDLESS, call_timeout=0.5) as runtime:
        runtime.generate([1], FIVE)
        time.sleep(0.8)
        assert (runtime.status().healthy, runtime.status().heartbeat_age) == (True, None)


EXIT = """
import sys
from spaceport.runtime import Decoding, Runtime
runtime = Runtime.open(sys.argv[1], threads=1, max_seq_len=512)
stream = runtime.stream("def f(self):\\n", Decoding(mask_slots=0))
next(stream)
{}
"""


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("last", ["", "sys.stream = stream", "del stream", "runtime.close()", "raise SystemExit(0)"])
def test_a_program_that_ends_before_its_texts_do_ends_quietly(demo_bundle: Path, last: str, times: int) -> None:
    command = [sys.executable, "-c", EXIT.format(last), str(demo_bundle)]
    for _ in range(times):  # an engine that is at work while Python goes away aborts the process, now and then
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
