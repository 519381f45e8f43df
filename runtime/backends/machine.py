"""The CPUs and the NVIDIA GPU that this process may use, found without loading any CUDA library."""

from __future__ import annotations

import ctypes
import math
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

_DRIVER = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_MOUNTS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")  # folders of the CPU controller in version 1
# Instruction sets that decide which kernels multiply, in /proc/cpuinfo's names, the newest first
_SETS = (
    *("amx_int8", "amx_bf16", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx512f", "avx2", "fma", "sse4_1"),
    *("sve2", "sve", "i8mm", "bf16", "asimddp", "asimd"),
)


def cpu_name() -> str:
    """The name of the CPU."""
    return _entry("model name") or platform.processor() or platform.machine()


def instruction_sets() -> tuple[str, ...]:
    """The CPU's instruction sets that matrix products use; empty if the system does not report them."""
    flags = f"{_entry('flags')} {_entry('Features')}".split()
    return tuple(name for name in _SETS if name in flags)


def cpu_class() -> str:
    """The class of the CPU, by which formats and drafts differ in speed and exactness."""
    sets = set(instruction_sets())
    if not sets:
        return f"{platform.machine()}, instruction sets unknown"
    if "asimd" in sets:
        return "ARM64 with 8-bit dot products" if "asimddp" in sets else "ARM64 without 8-bit dot products"
    if "amx_int8" in sets:
        return "AMX"
    if sets & {"avx512_vnni", "avx_vnni"}:
        return "VNNI without AMX"
    if "avx512f" in sets:
        return "AVX512 without VNNI"
    return "AVX2 without VNNI" if "avx2" in sets else "x86 without AVX2"


def _entry(name: str) -> str:
    """The first value of this name in /proc/cpuinfo; empty without one."""
    for line in (_text(Path("/proc/cpuinfo")) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


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
    limits = [limit for folder in _folders(root) for limit in _limits(folder)]
    return max(1, math.ceil(min(limits))) if limits else None


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
            yield from (top / part for part in (group, *group.parents))


def _limits(folder: Path) -> Iterator[float]:
    """CPUs that a control group may use, as versions 2 and 1 of control groups tell it."""
    version_2 = (_text(folder / "cpu.max") or "").split()
    version_1 = [(_text(folder / f"cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period")]
    for numbers in (version_2, version_1):
        if len(numbers) == 2 and all(map(str.isdecimal, numbers)) and int(numbers[1]):
            yield int(numbers[0]) / int(numbers[1])


def _text(file: Path) -> str | None:
    try:
        return file.read_text("utf-8")
    except OSError:
        return None


@dataclass(frozen=True)
class Gpu:
    """A GPU."""

    name: str
    target: str  # architecture that engines are built for, such as sm89
    memory: int  # bytes


class NoGpu(RuntimeError):
    """There is no usable GPU; the message says why."""


@lru_cache(maxsize=1)
def gpu() -> Gpu:
    """The first GPU of this process."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise NoGpu(f"no NVIDIA driver here ({_DRIVER} does not load)") from error
    if (code := driver.cuInit(0)) != 0:
        raise NoGpu(f"the NVIDIA driver does not start (cuInit says {code}): look at nvidia-smi")
    count, device = ctypes.c_int(), ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        raise NoGpu("the NVIDIA driver shows no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    codes = (
        driver.cuDeviceGet(ctypes.byref(device), 0),
        driver.cuDeviceGetName(name, len(name), device),
        driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device),
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device),
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device),
    )
    if any(codes):
        raise NoGpu(f"the NVIDIA driver does not report its GPU (codes {codes}): look at nvidia-smi")
    return Gpu(name.value.decode("utf-8", "replace"), f"sm{major.value}{minor.value}", memory.value)


def no_gpu() -> str | None:
    """Why there is no usable GPU; None if there is one."""
    try:
        gpu()
    except NoGpu as error:
        return str(error)
    return None
