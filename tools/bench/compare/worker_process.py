"""Worker process: one runtime in its own environment, measured by calls over stdin and stdout."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter, process_time, sleep
from typing import Any

from spaceport.tools.bench.compare.subjects import ADAPTERS, Subject

_TICKS = os.sysconf("SC_CLK_TCK")  # units per second of CPU times in /proc
_PAUSE = 0.05  # seconds; a process that uses no CPU time meanwhile is idle
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_TAIL = 4096  # bytes of a log that hold the last error


class WorkerFailed(RuntimeError):
    """A worker ended, did not answer or did not become idle; the message has its last output."""


@dataclass(frozen=True)
class UnsupportedCall:
    """A call that the API of a runtime does not support."""

    reason: str


@dataclass
class Worker:
    """A running worker process."""

    subject: Subject
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
        fields = self._proc("stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def resident_bytes(self) -> int:
        """Resident memory of the process."""
        line = next(line for line in self._proc("status").splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

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

    def _proc(self, name: str) -> str:
        try:
            return Path(f"/proc/{self.process.pid}/{name}").read_text("utf-8")
        except OSError:
            raise self._ended() from None

    def _ended(self) -> WorkerFailed:
        code = self.process.wait()
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
        last = lines[-1].strip() if lines else "nothing"
        return WorkerFailed(f"its process ended with exit code {code} and printed last: {last} (log: {self.log})")


def start(subject: Subject, threads: int, logs: Path, timeout: float) -> Worker:
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
    return Worker(subject, process, log, timeout)


def busy_seconds() -> float:
    """CPU time of all processes on the machine so far."""
    fields = [int(part) for part in Path("/proc/stat").read_text("utf-8").split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, *_ = fields
    return (user + nice + system + irq + softirq) / _TICKS


class OtherProcesses:
    """CPU time of the processes on the machine that are neither this one nor its workers, from now on."""

    def __init__(self, workers: Sequence[Worker] = ()) -> None:
        self._workers, self._started = workers, perf_counter()
        self._before = self._seconds()

    def cores(self) -> float | None:
        """CPU time of these processes per second; None if the system does not count it."""
        if self._before is None or (now := self._seconds()) is None:
            return None
        return max(0.0, now - self._before) / max(perf_counter() - self._started, 1e-9)

    def _seconds(self) -> float | None:
        """CPU time of these processes since the machine started."""
        if not Path("/proc/stat").exists():
            return None
        running = (worker for worker in self._workers if worker.process.poll() is None)
        return busy_seconds() - process_time() - sum(worker.cpu_seconds() for worker in running)
