"""Pool: a few helper processes; jobs get them in the order in which they came."""

from __future__ import annotations

import os
from collections import deque
from concurrent import futures
from concurrent.futures import Future
from threading import Lock
from time import monotonic
from typing import Any

from spaceport.runtime.isolation.process import CPU_SECONDS, DeadlinePassed, HelperProcess, JobFailed

PROCESSES = 2


class HelperPool:
    """Runs jobs of `spaceport.runtime.isolated_jobs` in helper processes; safe to use from several OS threads.

    Each job has its own limit of CPU time, so a job waits for those before it at most that long, divided by the number of
    processes.
    """

    def __init__(self, processes: int = PROCESSES, cpu_seconds: float = CPU_SECONDS) -> None:
        self._helpers = [HelperProcess(cpu_seconds) for _ in range(processes)]
        self._idle = self._helpers.copy()  # the one that was used last is taken first
        self._waiting: deque[Future[HelperProcess]] = deque()
        self._lock = Lock()
        self._owner = os.getpid()
        self._closed = False

    def run(self, job: str, deadline: float | None = None, **arguments: Any) -> Any:
        """The result of a job with these JSON arguments; waiting for a process counts towards the deadline."""
        helper = self._take(deadline)
        try:
            return helper.run(job, deadline, **arguments)
        finally:
            self._give(helper)

    def close(self) -> None:
        """End the processes for good; jobs that run or wait fail."""
        if self._owner != os.getpid():
            return
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            each.cancel()
        for helper in self._helpers:
            helper.close()

    def _take(self, deadline: float | None) -> HelperProcess:
        """The next helper process that is free."""
        if self._owner != os.getpid():
            raise JobFailed("the runtime was opened by the process that this one was forked from: open it here")
        turn: Future[HelperProcess] = Future()
        with self._lock:
            if self._closed:
                raise JobFailed("the runtime is closed")
            if self._idle:
                return self._idle.pop()
            self._waiting.append(turn)
        try:
            return turn.result(None if deadline is None else max(0.0, deadline - monotonic()))
        except BaseException as error:
            self._leave(turn)
            if isinstance(error, futures.TimeoutError):
                raise DeadlinePassed("the deadline passed before it began") from None
            if isinstance(error, futures.CancelledError):
                raise JobFailed("the runtime is closed") from None
            raise

    def _leave(self, turn: Future[HelperProcess]) -> None:
        """Stop waiting, and pass a process on that was given meanwhile."""
        with self._lock:
            if turn in self._waiting:
                self._waiting.remove(turn)
        if not turn.cancel():
            self._give(turn.result())

    def _give(self, helper: HelperProcess) -> None:
        """Give a process to the job that has waited longest."""
        with self._lock:
            while self._waiting:
                try:
                    self._waiting.popleft().set_result(helper)
                except futures.InvalidStateError:  # it waits no longer
                    continue
                return
            self._idle.append(helper)
