"""Machine: the CPU that a measurement was taken on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

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
