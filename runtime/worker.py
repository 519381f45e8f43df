"""Worker: the OS thread on which a scheduler's rounds run."""

from __future__ import annotations

from threading import Condition, Thread

from spaceport.runtime.scheduler import Scheduler, Task

_PATIENCE = 5.0  # seconds without work after which the OS thread ends; the next request begins another


class RuntimeClosed(RuntimeError):
    """The runtime was closed."""


class Worker:
    """Runs rounds while there is work; requests may come from any OS thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._change = Condition()
        self._thread: Thread | None = None
        self._closing = False

    def submit(self, task: Task) -> None:
        """Hand a request over."""
        with self._change:
            if self._closing:
                raise RuntimeClosed("the runtime is closed")
            self._scheduler.submit(task)
            if self._thread is None:
                # a daemon: a program that ends without closing its runtimes does not wait for their texts
                self._thread = Thread(target=self._work, name="spaceport", daemon=True)
                self._thread.start()
            self._change.notify()

    def close(self) -> None:
        """End everything that waits or runs, when the step that is under way is over."""
        with self._change:
            self._closing = True
            self._change.notify()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._scheduler.fail(RuntimeClosed("the runtime was closed before the text ended"))

    def _work(self) -> None:
        while self._has_work():
            try:
                self._scheduler.round()
            except BaseException as error:  # noqa: BLE001  (everybody is told)
                self._scheduler.fail(error)

    def _has_work(self) -> bool:
        with self._change:
            if not self._closing and not self._scheduler.busy:
                self._change.wait(_PATIENCE)
            if self._closing or not self._scheduler.busy:
                self._thread = None
                return False
            return True
