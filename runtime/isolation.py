"""Work that may take too long, in processes that can be killed."""

from __future__ import annotations

import json
import math
import os
import selectors
import subprocess
import sys
from contextlib import suppress
from queue import Empty, LifoQueue
from threading import Lock
from time import monotonic
from typing import Any

from spaceport.graphs.contract.faults import OptionFault

CPU_SECONDS = 1.0  # CPU time of a job
_WALL_SECONDS = 10.0  # a job's limit on a machine that is too busy to give it its CPU time
_START_SECONDS = 60.0
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from spaceport.runtime.isolated_jobs import main; main(float(sys.argv[2]))"
)
PROCESSES = 2


class JobFailed(OptionFault):
    """The job raised an error, or it needed more time or memory than allowed."""


class DeadlinePassed(JobFailed):
    """The deadline of the request passed while its job waited or ran."""


class HelperProcess:
    """Runs jobs of `spaceport.runtime.isolated_jobs`; started by the first job, safe to use from several OS threads.

    The process is spawned, not forked, inherits no files or sockets, and ends with `close` or with this process.
    """

    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._lock = Lock()  # one job at a time
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False  # whether the process has started
        self._owner = os.getpid()
        self._closed = False

    def run(self, job: str, deadline: float | None = None, **arguments: Any) -> Any:
        """The result of a job with these JSON arguments.

        `deadline` is a time of the monotonic clock, after which `DeadlinePassed` is raised.
        """
        request = json.dumps({"job": job, **arguments}).encode() + b"\n"
        with self._lock:
            if self._closed:
                raise JobFailed("the runtime is closed")
            process = self._started(deadline)
            assert process.stdin is not None
            try:
                process.stdin.write(request)
                process.stdin.flush()
                answer = json.loads(_line(process, _WALL_SECONDS, deadline))
            except (OSError, EOFError) as error:
                self._end()
                if self._closed:
                    raise JobFailed("the runtime is closed") from error
                with suppress(OSError):  # which the next job reports
                    self._process = self._spawned()  # starts while nobody waits for it
                if isinstance(error, TimeoutError) and _is_past(deadline):
                    raise DeadlinePassed("the deadline passed before it ended") from error
                raise JobFailed(f"took more than {self._cpu_seconds:g} s or too much memory") from error
            except BaseException:
                self._end()  # the answer of an interrupted job must not become that of the next one
                raise
        if "error" in answer:
            raise JobFailed(str(answer["error"]))
        return answer["result"]

    def close(self) -> None:
        """End the process for good; a job that it runs fails."""
        self._closed = True
        if self._owner == os.getpid() and (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def __del__(self) -> None:
        self._end()

    def _started(self, deadline: float | None) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = self._spawned()
        try:
            if not self._ready and not _is_past(deadline):
                _line(self._process, _START_SECONDS, deadline)
                self._ready = True
        except (OSError, EOFError) as error:
            if not (isinstance(error, TimeoutError) and _is_past(deadline)):
                self._end()
                raise JobFailed(f"the helper process did not start: {sys.executable}") from error
        if _is_past(deadline):
            raise DeadlinePassed("the deadline passed before it began")
        return self._process

    def _spawned(self) -> subprocess.Popen[bytes]:
        """A new process, which says when it is ready."""
        self._ready = False
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, json.dumps(sys.path), str(self._cpu_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl+C in a terminal is not for it
        )

    def _end(self) -> None:
        """Kill the process and wait for its end, so that no zombie remains."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unsent bytes of a job that was interrupted
                    pipe.close()


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and monotonic() >= deadline


def _line(process: subprocess.Popen[bytes], seconds: float, deadline: float | None) -> bytes:
    """The next line that a process writes; raises EOFError if it ends, TimeoutError after these seconds or the deadline."""
    assert process.stdout is not None
    until, line = min(monotonic() + seconds, math.inf if deadline is None else deadline), b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, until - monotonic())):
                raise TimeoutError
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise EOFError
            line += chunk
    return line


class HelperPool:
    """Runs jobs of `spaceport.runtime.isolated_jobs` in helper processes; safe to use from several OS threads.

    Jobs wait in the order in which they came. Each has its own limit of CPU time, so it waits for those before it at most
    that long, divided by the number of processes.
    """

    def __init__(self, processes: int = PROCESSES, cpu_seconds: float = CPU_SECONDS) -> None:
        self._helpers = [HelperProcess(cpu_seconds) for _ in range(processes)]
        self._idle: LifoQueue[HelperProcess] = LifoQueue()  # the one that was used last is taken first
        for helper in reversed(self._helpers):
            self._idle.put(helper)
        self._owner = os.getpid()

    def run(self, job: str, deadline: float | None = None, **arguments: Any) -> Any:
        """The result of a job with these JSON arguments; waiting for a process counts towards the deadline."""
        if self._owner != os.getpid():
            raise JobFailed("the runtime was opened by the process that this one was forked from: open it here")
        try:
            helper = self._idle.get(timeout=None if deadline is None else max(0.0, deadline - monotonic()))
        except Empty:
            raise DeadlinePassed("the deadline passed before it began") from None
        try:
            return helper.run(job, deadline, **arguments)
        finally:
            self._idle.put(helper)

    def close(self) -> None:
        """End the processes for good; jobs that run or wait fail."""
        if self._owner == os.getpid():
            for helper in self._helpers:
                helper.close()
