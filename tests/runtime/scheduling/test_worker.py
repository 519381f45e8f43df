"""The worker: texts are asked for from many OS threads at once, and end with their readers, in time, or with the runtime."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spaceport.runtime.decode.request import Request
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.queue import QueueFull
from spaceport.runtime.scheduling.scheduler import Scheduler
from spaceport.runtime.scheduling.stream import Stream
from spaceport.runtime.scheduling.task import Task
from spaceport.runtime.scheduling.worker import RuntimeClosed, Worker
from spaceport.runtime.session import Runtime
from support.arrivals import CalledTask
from support.hash_engine import HashEngine, Language, request_for
from support.paths import DEMO as MODEL
from support.stepwise_engine import close_between_steps, stepwise_runtime

ASKED: dict[str, Any] = json.loads((MODEL / "prompts.json").read_text("utf-8"))
PROMPTS = [
    [{"role": "user", "content": ASKED["triangular"]["user"]}],
    ASKED["source"],
    "import json\n",
    [{"role": "user", "content": "Explain the parameters of move( src, dst )"}],
]
ENDLESS = Language(3, end_every=10**9)  # goes on to its limit
PLAIN = Decoding(mask_slots=0)
PLAIN_40 = Decoding(max_tokens=40, mask_slots=0, max_threads=1)


@pytest.fixture
def open_runtime() -> Iterator[Callable[..., Runtime]]:
    """Opens runtimes whose OS threads must all be gone at the end."""
    opened: list[Runtime] = []

    def one(*arguments: Any, **options: Any) -> Runtime:
        opened.append(Runtime.open(*arguments, **options))
        return opened[-1]

    yield one
    for runtime in opened:
        runtime.close()
    assert not workers()


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "spaceport"]


def task_of(request: Request, done: threading.Event, error: Exception | None = None) -> Task:
    """A task that sets an event at its end, and raises an error each time that it has made progress."""

    def on_progress(over: bool) -> None:
        if over:
            done.set()
        if error is not None:
            raise error

    return CalledTask(request=request, call=on_progress)


def test_texts_that_sixteen_threads_ask_for_at_once_are_what_each_is_alone(
    any_demo_bundle: Path, open_runtime: Callable[..., Runtime]
) -> None:
    ways = [Decoding(max_tokens=40), Decoding(max_tokens=40, mask_slots=0), Decoding(max_tokens=40, draft="chain")]
    wanted = [(number, ways[position % 3]) for position, number in enumerate([0, 1, 2, 3] * 3)]
    with Runtime.open(any_demo_bundle, threads=1, max_seq_len=256) as runtime:
        alone = [runtime.generate(PROMPTS[number], PLAIN_40).text for number in range(4)]
    shared = open_runtime(any_demo_bundle, threads=1, max_seq_len=256, max_requests=4)

    def several(offset: int) -> list[tuple[int, str]]:
        own = wanted[offset % len(wanted) :][:3]
        return [(number, shared.generate(PROMPTS[number], way).text) for number, way in own]

    with ThreadPoolExecutor(16) as pool:
        for texts in pool.map(several, range(16)):
            for number, text in texts:
                assert text == alone[number]


def test_closing_ends_every_text_and_leaves_no_os_thread() -> None:
    runtime, engine = stepwise_runtime(ENDLESS, requests=2)
    streams = [runtime.stream([1, 2, number], PLAIN) for number in range(4)]  # two of them wait
    engine.wait()
    for _ in range(6):
        engine.step()
    with ThreadPoolExecutor(4) as pool:
        texts = [pool.submit(stream.completion) for stream in streams]
        close_between_steps(runtime, engine)
        for text in texts:
            with pytest.raises(RuntimeClosed, match="the runtime was closed before the completion ended"):
                text.result(60)
    assert not workers()
    with pytest.raises(RuntimeClosed, match="the runtime is closed"):
        runtime.stream([1])
    runtime.close()


def test_what_was_written_before_the_runtime_closed_can_be_read() -> None:
    runtime, engine = stepwise_runtime(ENDLESS)
    stream = runtime.stream([1, 2, 3], PLAIN)
    engine.wait()
    for _ in range(3):
        engine.step()
    close_between_steps(runtime, engine)
    assert [next(stream).token for _ in range(3)] == ENDLESS.write([1, 2, 3], 3)
    with pytest.raises(RuntimeClosed):
        stream.completion()


def test_a_text_that_nobody_reads_any_more_ends_with_the_step_under_way() -> None:
    runtime, engine = stepwise_runtime(ENDLESS)
    with runtime:
        stream: Stream | None = runtime.stream([1, 2, 3], PLAIN)
        engine.wait()
        second = runtime.stream([4, 5], PLAIN)
        engine.step()
        del stream
        gc.collect()
        engine.step()  # the last of the first text
        assert second.statistics.waiting_seconds > 0
        engine.go()
        assert second.completion().tokens == tuple(ENDLESS.write([4, 5], 62))


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


@pytest.mark.parametrize("bundle", ["demo_bundle", pytest.param("demo_int8_bundle", marks=pytest.mark.nightly)])
def test_a_text_ends_at_its_deadline_with_what_there_is(
    request: pytest.FixtureRequest, bundle: str, open_runtime: Callable[..., Runtime]
) -> None:
    runtime = open_runtime(request.getfixturevalue(bundle), threads=1, max_seq_len=512)
    whole = runtime.generate(PROMPTS[1], PLAIN)
    late = runtime.generate(PROMPTS[1], Decoding(mask_slots=0, timeout=1e-9))
    assert (late.ending, late.text, late.tokens) == ("deadline", "", ())
    found = runtime.generate(PROMPTS[1], Decoding(mask_slots=0, timeout=0.05))
    assert whole.text.startswith(found.text)
    assert found.ending in ("deadline", "length")
    assert runtime.generate(PROMPTS[1], Decoding(mask_slots=0, timeout=600)).ending == whole.ending


def test_a_deadline_counts_the_time_in_the_queue() -> None:
    runtime, engine = stepwise_runtime(ENDLESS)
    with runtime:
        first = runtime.stream([1, 2, 3], Decoding(max_tokens=5))
        engine.wait()
        late = runtime.stream([4, 5], Decoding(timeout=0.01))
        time.sleep(0.02)
        engine.go()
        assert late.completion().ending == "deadline"
        assert late.statistics.steps == 0
        assert first.completion().tokens == tuple(ENDLESS.write([1, 2, 3], 5))


def test_a_request_over_the_limits_is_refused_before_it_is_queued() -> None:
    runtime, engine = stepwise_runtime(ENDLESS, queue_limit=1)
    with runtime:
        streams = [runtime.stream([1, 2], Decoding(max_tokens=3)) for _ in range(2)]
        with pytest.raises(QueueFull, match="queue_limit is 1: try again later, or raise queue_limit or max_requests"):
            runtime.generate([1])
        engine.go()
        assert len({stream.completion().tokens for stream in streams}) == 1
        assert runtime.generate([1, 2], Decoding(max_tokens=3)).ending == "length"


def test_the_os_thread_ends_when_there_is_nothing_to_do_and_another_begins_with_the_next_text() -> None:
    engine = HashEngine(ENDLESS, 300, 1)
    worker = Worker(Scheduler(engine, 8), patience=0.01)
    for prompt in ([1, 2], [3]):
        done = threading.Event()
        task = task_of(request_for(engine, prompt, 9, 0), done)
        worker.submit(task)
        assert done.wait(60)
        assert task.request.threads[0].generated == ENDLESS.write(prompt, 9)
        for thread in workers():
            thread.join(60)
        assert not workers()
    worker.close()


def test_a_worker_that_waits_is_woken_by_the_next_text() -> None:
    worker = Worker(Scheduler(HashEngine(ENDLESS, 300, 1), 8), patience=1000)
    for prompt in ([1, 2], [3]):
        done = threading.Event()
        worker.submit(task_of(request_for(HashEngine(ENDLESS, 300, 1), prompt, 9, 0), done))
        assert done.wait(60)
        time.sleep(0.1)  # by now it waits
    worker.close()
    assert not workers()


def test_a_task_that_raises_on_progress_affects_no_other() -> None:
    engine = HashEngine(ENDLESS, 300, 2)
    worker = Worker(Scheduler(engine, 8))
    ended, done = threading.Event(), threading.Event()
    bad = task_of(request_for(engine, [1], 40, 0), ended, ValueError("no progress, please"))
    good = task_of(request_for(engine, [2], 40, 0), done)
    worker.submit(bad)
    worker.submit(good)
    assert ended.wait(60)
    assert done.wait(60)
    worker.close()
    assert isinstance(bad.fault, ValueError)
    assert good.request.threads[0].generated == ENDLESS.write([2], 40)
    assert not workers()


EXIT = """
import sys
from spaceport.runtime import Decoding, Runtime
runtime = Runtime.open(sys.argv[1], threads=1, max_seq_len=512)
stream = runtime.stream("def f(self):\\n", Decoding(mask_slots=0))
next(stream)
{}
print("out")
"""


@pytest.mark.parametrize("last", ["", "sys.stream = stream", "del stream", "runtime.close()", "raise SystemExit(0)"])
def test_a_program_that_ends_before_its_texts_do_ends_quietly(demo_bundle: Path, last: str) -> None:
    command = [sys.executable, "-c", EXIT.format(last), str(demo_bundle)]
    for _ in range(3):  # an engine that is at work while Python goes away aborts the process, now and then
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
