"""Processes: what a measured process uses, read from the system."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from spaceport.graphs.contract.faults import InputFault

_TICKS = os.sysconf("SC_CLK_TCK")  # units per second of CPU times in /proc
_TAIL = 2048  # bytes of a log that hold the last error


class ProcessFailed(InputFault):
    """A measured process ended or did not answer; the message has its last output."""


@dataclass(frozen=True)
class Resources:
    """What a process holds and has used."""

    resident_bytes: int
    file_descriptors: int
    threads: int
    cpu_seconds: float  # of all threads
    main_thread_seconds: float  # CPU time of the first thread: the event loop of a Python service


def resources_of(pid: int) -> Resources:
    """What a process holds now and has used so far."""
    folder = Path(f"/proc/{pid}")
    try:
        status = (folder / "status").read_text("utf-8")
        fields = dict(line.split(":", 1) for line in status.splitlines())
        descriptors = len(list((folder / "fd").iterdir()))
        cpu, main = (_cpu_seconds(path) for path in (folder / "stat", folder / f"task/{pid}/stat"))
    except OSError as error:
        raise ProcessFailed(f"process {pid} has ended: {error.strerror}") from error
    return Resources(int(fields["VmRSS"].split()[0]) * 1024, descriptors, int(fields["Threads"]), cpu, main)


def _cpu_seconds(stat: Path) -> float:
    fields = stat.read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def last_lines(log: Path) -> str:
    """The end of a log, for error messages."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return f"{lines[-1].strip() if lines else 'nothing'} (log: {log})"


def end(process: subprocess.Popen[str]) -> None:
    """End a process and wait for it."""
    process.terminate()
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
