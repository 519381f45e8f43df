"""Workers: one process for each compared runtime, called over stdin and stdout."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from spaceport.tools.bench.environments import ADAPTERS, ComparedRuntime
from spaceport.tools.bench.machine import cpu_seconds, last_lines

_PAUSE = 0.05  # seconds; a process that uses no CPU time meanwhile is idle
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class WorkerFailed(RuntimeError):
    """A worker ended, did not answer or did not become idle; the message has its last output."""


@dataclass(frozen=True)
class UnsupportedCall:
    """A call that the API of a runtime does not support."""

    reason: str


@dataclass
class WorkerProcess:
    """A running worker process."""

    subject: ComparedRuntime
    process: subprocess.Popen[str]
    log: Path
    timeout: float  # seconds to wait for an answer
    opened: dict[str, Any] = field(default_factory=dict)

    def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any] | UnsupportedCall:
        """The answer to one call; the process computes only until then."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise self._ended() from None
        ready, _, _ = select.select([self.process.stdout], [], [], self.timeout)
        if not ready:
            raise WorkerFailed(f"no answer within {self.timeout:g} s: look at {self.log}")
        line = self.process.stdout.readline()
        if not line:
            raise self._ended()
        answer = json.loads(line)
        return UnsupportedCall(answer["unsupported"]) if "unsupported" in answer else dict(answer["result"])

    def cpu_seconds(self) -> float:
        """CPU time of all threads so far, with a resolution of 10 ms."""
        try:
            return cpu_seconds(self._proc("stat"))
        except OSError:
            raise self._ended() from None

    def resident_bytes(self) -> int:
        """Resident memory of the process."""
        try:
            status = self._proc("status").read_text("utf-8")
        except OSError:
            raise self._ended() from None
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1]) * 1024

    def wait_until_idle(self, limit: float) -> None:
        """Wait until no thread of the process uses CPU time: threads of some libraries spin for a while after a call."""
        end, before = monotonic() + limit, self.cpu_seconds()
        while True:
            sleep(_PAUSE)
            now = self.cpu_seconds()
            if now == before:
                return
            if monotonic() > end:
                raise WorkerFailed(f"still busy {limit:g} s after its measurement: expected an idle process")
            before = now

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()

    def _proc(self, name: str) -> Path:
        return Path(f"/proc/{self.process.pid}/{name}")

    def _ended(self) -> WorkerFailed:
        code = self.process.wait()
        return WorkerFailed(f"its process ended with exit code {code} and printed last: {last_lines(self.log)}")


def start_worker(subject: ComparedRuntime, threads: int, logs: Path, timeout: float) -> WorkerProcess:
    """The worker process of a subject, before it opens a model."""
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"worker-{subject.name.replace(' ', '-').replace('/', '-')}.log"
    environment = {**os.environ, **{name: str(threads) for name in _THREADS}, "PYTHONUNBUFFERED": "1"}
    if not subject.is_bundle:
        environment.pop("PYTHONPATH", None)
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [str(subject.python), str(ADAPTERS / "worker.py"), str(subject.adapter)]
    with log.open("w", encoding="utf-8") as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
            )
        except OSError as error:
            raise WorkerFailed(f"{subject.python}: {error.strerror}: expected an interpreter; add --setup") from error
    return WorkerProcess(subject, process, log, timeout)


def open_model(worker: WorkerProcess, length: int, threads: int, idle_limit: float) -> None:
    """Open the model of a worker for contexts of this length; a worker that fails is closed."""
    read_files(worker.subject.model)
    settings = {"model": str(worker.subject.model), "threads": threads, "length": length}
    try:
        answer = worker.call("open", {**settings, **worker.subject.options})
        if isinstance(answer, UnsupportedCall):
            raise WorkerFailed(answer.reason)
        worker.opened = answer
        worker.wait_until_idle(idle_limit)
    except WorkerFailed:
        worker.close()
        raise


def read_files(path: Path) -> None:
    """Read the files of a model once, so that it is opened from the page cache."""
    for file in [path] if path.is_file() else sorted(item for item in path.rglob("*") if item.is_file()):
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass
