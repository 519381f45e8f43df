"""Machine: the CPU that a measurement was taken on, and what its processes use."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

# CPU extensions that decide which int8 kernels run.
_FLAGS = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
)
_NUMBERS = {"cpu family": "family", "model": "model", "stepping": "stepping"}
_TICKS = os.sysconf("SC_CLK_TCK")  # units per second of CPU times in /proc


@dataclass(frozen=True)
class Machine:
    """A CPU and its operating system."""

    cpu: str
    model: str  # family, model and stepping: virtual machines often hide the name
    cores: int  # cores that this process may use
    flags: tuple[str, ...]  # the extensions of _FLAGS that the CPU has
    system: str


def this_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    """The machine that this process runs on."""
    fields: dict[str, str] = {}
    lines = cpuinfo.read_text("utf-8").splitlines() if cpuinfo.is_file() else []
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    present = set(fields.get("flags", "").split())
    return Machine(
        fields.get("model name", platform.processor() or "unknown"),
        ", ".join(f"{name} {fields[key]}" for key, name in _NUMBERS.items() if key in fields),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        tuple(flag for flag in _FLAGS if flag in present),
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    )


def cpu_seconds(stat: Path) -> float:
    """CPU time in a file such as /proc/PID/stat, with a resolution of 10 ms."""
    fields = stat.read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def is_running(process: int) -> bool:
    """Whether an OS thread of a process runs or waits for a CPU."""
    for stat in Path(f"/proc/{process}/task").glob("*/stat"):
        with suppress(OSError):  # the OS thread has ended
            if stat.read_text("utf-8").rpartition(")")[2].split()[0] == "R":
                return True
    return False


def busy_seconds() -> float:
    """CPU time of all processes on the machine so far."""
    fields = [int(part) for part in Path("/proc/stat").read_text("utf-8").split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, *_ = fields
    return (user + nice + system + irq + softirq) / _TICKS


class OtherProcesses:
    """CPU time of the processes on the machine that are neither this one nor its children, from now on."""

    def __init__(self, children: Sequence[subprocess.Popen[str]] = ()) -> None:
        self._children, self._started = children, perf_counter()
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
        running = [child.pid for child in self._children if child.poll() is None]
        return busy_seconds() - process_time() - sum(cpu_seconds(Path(f"/proc/{pid}/stat")) for pid in running)
