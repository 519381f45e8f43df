"""Lanes: OS threads that admit requests, first come, first served."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from spaceport.runtime.scheduling.submission import Submission
from spaceport.runtime.scheduling.worker import RuntimeClosed

LANE_THREADS = 2


class Lane:
    """A few OS threads, started when they are needed; what waits for them can be discarded."""

    def __init__(self, name: str, threads: int = LANE_THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._waiting: dict[Submission[Any], Callable[[], None]] = {}  # with what to do, in order
        self._lock = Lock()

    def put(self, submission: Submission[Any], work: Callable[[], None]) -> None:
        """Let an OS thread do the work of a submission; raises RuntimeError once the lane is closed."""
        with self._lock:
            self._waiting[submission] = work
        try:
            self._pool.submit(self._next)  # holds no request, so that a discarded one is free at once
        except RuntimeError:
            self.remove(submission)
            raise

    def remove(self, submission: Submission[Any]) -> bool:
        """Remove a submission that waits; returns whether it did."""
        with self._lock:
            return self._waiting.pop(submission, None) is not None

    def close(self) -> None:
        """End the OS threads after their current work, without waiting."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            work = self._waiting.pop(next(iter(self._waiting)))
        work()


class Lanes:
    """One lane for requests that are tokenized here, one for those that need a helper process, which may take long."""

    def __init__(self) -> None:
        self._quick = Lane("spaceport-admission")
        self._isolated = Lane("spaceport-isolated")
        self._open: set[Submission[Any]] = set()
        self._lock = Lock()
        self._closed = False

    def admit(self, submission: Submission[Any], isolates: Callable[[], bool]) -> None:
        """Admit a request on an OS thread; `isolates` says there whether it needs a helper process."""
        with self._lock:
            if not self._closed:
                self._open.add(submission)
        try:
            self._quick.put(submission, lambda: self._sort(submission, isolates))
        except RuntimeError:
            self._fail(submission)

    def discard(self, submission: Submission[Any]) -> None:
        """Give up what remains to be done for a submission that is over."""
        if self._quick.remove(submission) or self._isolated.remove(submission):
            self._finish(submission)
            submission.forget()

    def close(self) -> None:
        """Fail all requests that are being admitted, and end the OS threads without waiting for their work."""
        with self._lock:
            self._closed = True
            left = list(self._open)
        for submission in left:
            submission.fail(RuntimeClosed("the runtime was closed before the completion ended"))
            self.discard(submission)
        self._quick.close()
        self._isolated.close()

    def _sort(self, submission: Submission[Any], isolates: Callable[[], bool]) -> None:
        """Admit a request here, or in the other lane."""
        try:
            isolated = not submission.settled and isolates()
        except BaseException:  # noqa: BLE001  (admission raises it again)
            isolated = False
        if not isolated:
            self._run(submission)
            return
        try:
            self._isolated.put(submission, lambda: self._run(submission))
        except RuntimeError:
            self._fail(submission)

    def _run(self, submission: Submission[Any]) -> None:
        submission.run()
        self._finish(submission)

    def _fail(self, submission: Submission[Any]) -> None:
        submission.fail(RuntimeClosed("the runtime is closed"))
        submission.forget()
        self._finish(submission)

    def _finish(self, submission: Submission[Any]) -> None:
        with self._lock:
            self._open.discard(submission)
