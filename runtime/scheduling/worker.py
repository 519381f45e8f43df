"""Worker: the OS thread that runs the scheduler's rounds."""

from __future__ import annotations

import atexit
import os
from threading import Condition, Thread

from spaceport.graphs.contract.faults import SpaceportError
from spaceport.runtime.scheduling.scheduler import Scheduler
from spaceport.runtime.scheduling.task import Task

PATIENCE = 5.0  # idle seconds after which the OS thread ends; the next request starts another


class RuntimeClosed(SpaceportError, RuntimeError):
    """The runtime was closed before the request ended, or before it was submitted."""


class Worker:
    """Runs rounds while there are requests, which may be submitted from any OS thread."""

    def __init__(self, scheduler: Scheduler, patience: float = PATIENCE) -> None:
        self._scheduler = scheduler
        self._patience = patience
        self._change = Condition()
        self._thread: Thread | None = None
        self._closing = False
        self._process = os.getpid()

    def submit(self, task: Task) -> None:
        """Submit a request."""
        with self._change:
            if self._closing:
                raise RuntimeClosed("the runtime is closed")
            if os.getpid() != self._process:
                raise RuntimeError("the runtime was opened by the process that this one was forked from: open it here")
            if self._thread is None:
                self._thread = self._begin()
            self._scheduler.submit(task)
            self._change.notify()

    def close(self) -> None:
        """End all requests after the current step."""
        with self._change:
            self._closing = True
            self._change.notify()
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._change:
            atexit.unregister(self.close)
            self._scheduler.fail(RuntimeClosed("the runtime was closed before the completion ended"))

    def _begin(self) -> Thread:
        # A daemon thread: a program that ends without closing its runtimes does not wait for their completions. It waits
        # for the current step, since an OS thread inside an engine aborts the process when Python exits.
        thread = Thread(target=self._work, name="spaceport", daemon=True)
        thread.start()
        atexit.register(self.close)
        return thread

    def _work(self) -> None:
        while self._has_work():
            try:
                self._scheduler.round()
            except BaseException as error:  # noqa: BLE001  (fails all requests)
                self._scheduler.fail(error)

    def _has_work(self) -> bool:
        with self._change:
            if not self._closing and not self._scheduler.busy:
                self._change.wait(self._patience)
            if self._closing:
                return False
            if not self._scheduler.busy:
                atexit.unregister(self.close)
                self._thread = None
                return False
            return True
