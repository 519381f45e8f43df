"""CPUs: how many of them this process may use, by its affinity and the limit of its container."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MOUNTS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")  # folders of the CPU controller in version 1


def engine_threads(threads: int) -> int:
    """Threads for an engine: those asked for; for 0, as many as the container's limit allows, or 0 if it has none."""
    limit = None if threads else cpu_limit()
    return threads if limit is None or limit >= _affinity() else limit


def usable_cpus() -> int:
    """Number of CPUs that this process may use."""
    limit = cpu_limit()
    return _affinity() if limit is None else min(limit, _affinity())


def cpu_limit(root: Path = Path("/")) -> int | None:
    """The CPU time that the control groups of this process may use, in CPUs, rounded up; None: unlimited."""
    found = [
        limit for folder in _folders(root) for limit in (_version_2(folder), _version_1(folder)) if limit is not None
    ]
    return max(1, math.ceil(min(found))) if found else None


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _folders(root: Path) -> Iterator[Path]:
    """The folders of the control groups of this process and of those around them."""
    mounted = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = PurePosixPath(path.lstrip("/"))  # in a container, the folder may be missing and its mount is the group
        for top in (mounted / name for name in _MOUNTS) if controllers else (mounted,):
            yield from (top / each for each in (group, *group.parents))


def _version_2(folder: Path) -> float | None:
    quota, _, period = (_text(folder / "cpu.max") or "max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _version_1(folder: Path) -> float | None:
    quota, period = ((_text(folder / f"cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _text(file: Path) -> str | None:
    try:
        return file.read_text("utf-8")
    except OSError:
        return None
