"""Device: the NVIDIA GPU as its driver reports it, without loading any CUDA library."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

_DRIVER = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


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
