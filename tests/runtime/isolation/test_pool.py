"""Pool: jobs run in a few processes at a time, in the order in which they came, and stop waiting at their deadline."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from time import monotonic, sleep

import pytest

from spaceport.runtime.isolation.pool import HelperPool
from spaceport.runtime.isolation.process import DeadlinePassed, HelperProcess, JobFailed


class Jobs:
    """Stands for helper processes: each job waits until the test lets it end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.leave = Semaphore(0)
        self.changed = Semaphore(0)
        monkeypatch.setattr(HelperProcess, "run", self._run)

    def _run(self, job: str, deadline: float | None = None, **_: object) -> str:
        self.begun.append(job)
        self.changed.release()
        assert self.leave.acquire(timeout=60)
        if job == "bad":
            raise JobFailed("bad")
        return job

    def wait(self) -> None:
        assert self.changed.acquire(timeout=60)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    return Jobs(monkeypatch)


def waiting(pool: HelperPool, count: int) -> None:
    while len(pool._waiting) < count:
        sleep(0.001)


def test_two_jobs_run_at_a_time_and_the_others_follow_in_order(jobs: Jobs) -> None:
    pool = HelperPool(processes=2)
    with ThreadPoolExecutor(8) as callers:
        found: list[Future[object]] = []
        for number, name in enumerate(("a", "bad", "c", "d", "e")):
            found.append(callers.submit(pool.run, name))
            if number < 2:
                jobs.wait()
            waiting(pool, max(0, number - 1))
        assert jobs.begun == ["a", "bad"]
        for expected in (["a", "bad", "c"], ["a", "bad", "c", "d"], ["a", "bad", "c", "d", "e"]):
            jobs.leave.release()
            jobs.wait()
            assert jobs.begun == expected
        jobs.leave.release(9)
        assert [str(each.exception() or each.result()) for each in found] == ["a", "bad", "c", "d", "e"]
    assert len(pool._idle) == 2


def test_waiting_counts_towards_the_deadline(jobs: Jobs) -> None:
    pool = HelperPool(processes=1)
    with ThreadPoolExecutor(1) as callers:
        first = callers.submit(pool.run, "a")
        jobs.wait()
        with pytest.raises(DeadlinePassed, match="before it began"):
            pool.run("b", monotonic() + 0.01)
        jobs.leave.release(2)
        assert first.result(60) == "a"
        assert pool.run("c", monotonic() + 60) == "c"
    assert jobs.begun == ["a", "c"]


def test_closing_ends_jobs_that_wait(jobs: Jobs) -> None:
    pool = HelperPool(processes=1)
    with ThreadPoolExecutor(2) as callers:
        callers.submit(pool.run, "a")
        jobs.wait()
        second = callers.submit(pool.run, "b")
        waiting(pool, 1)
        pool.close()
        with pytest.raises(JobFailed, match="the runtime is closed"):
            second.result(60)
        jobs.leave.release()
    with pytest.raises(JobFailed, match="the runtime is closed"):
        pool.run("c")


@pytest.mark.slow
def test_a_job_ends_at_its_deadline_or_with_the_pool() -> None:
    pool = HelperPool(processes=1, cpu_seconds=30)
    messages = [{"role": "user", "content": "b"}]
    endless = {"source": "{{ 10 ** (10 ** 8) }}", "special_tokens": {}, "messages": messages}
    with pytest.raises(DeadlinePassed):
        pool.run("render", monotonic() + 0.01, **endless, ask=True)  # while the process starts
    assert pool.run("render", **endless | {"source": "{{ 1 * 2 }}"}, ask=True) == "2"
    with pytest.raises(DeadlinePassed, match="before it ended"):
        pool.run("render", monotonic() + 0.1, **endless, ask=True)
    assert pool.run("render", **endless | {"source": "{{ 1 * 2 }}"}, ask=True) == "2"
    with ThreadPoolExecutor(1) as callers:
        found = callers.submit(pool.run, "render", **endless, ask=True)
        sleep(0.1)
        pool.close()
        with pytest.raises(JobFailed, match="the runtime is closed"):
            found.result(10)
