"""Zeroing and copying memory of an NVIDIA GPU, through its driver: onnxruntime copies nothing within a device buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

_DRIVER = "libcuda.so.1"
_HOST, _DEVICE = 1, 2  # CUmemorytype


class Blocks(NamedTuple):
    """Memory of planes of blocks of consecutive rows, of which the first rows are copied: a KV buffer of a request."""

    address: int
    block: int  # bytes from a block to the next one
    blocks: int  # blocks from a plane to the next one
    device: bool = True  # False: memory of the host


def _fields_of(side: str) -> list[tuple[str, Any]]:
    """The fields of CUDA_MEMCPY3D for its source or its target."""
    sizes, pointers = ctypes.c_size_t, ctypes.c_void_p
    return [
        *((f"{side}_{name}", sizes) for name in ("x", "y", "z", "lod")),
        (f"{side}_type", ctypes.c_uint),
        *((f"{side}_{name}", pointers) for name in ("host", "device", "array", "reserved")),
        *((f"{side}_{name}", sizes) for name in ("pitch", "height")),
    ]


class _Copy3d(ctypes.Structure):
    """CUDA_MEMCPY3D of cuda.h."""

    _fields_ = (
        *_fields_of("source"),
        *_fields_of("target"),
        *((name, ctypes.c_size_t) for name in ("width", "height", "depth")),
    )


class DeviceMemory:
    """Zeroes and copies memory of the first GPU; every call returns when the work is done.

    It does not wait for work that others have started: onnxruntime's calls end before they return.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._require("cuInit", 0)
        self._require("cuDeviceGet", ctypes.byref(device), 0)
        self._device = device.value
        self._require("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)

    def zero(self, ranges: list[tuple[int, int]]) -> None:
        """Set ranges of memory, as address and bytes, to zero."""
        with self._work():
            for address, size in ranges:
                self._require("cuMemsetD8_v2", ctypes.c_void_p(address), ctypes.c_ubyte(0), ctypes.c_size_t(size))

    def copy(self, copies: list[tuple[Blocks, Blocks]], width: int, blocks: int, planes: int) -> None:
        """Copy the first `width` bytes of blocks in planes, for each pair of a source and a target."""
        with self._work():
            for source, target in copies:
                copy = _Copy3d(width=width, height=blocks, depth=planes)
                for side, memory in (("source", source), ("target", target)):
                    setattr(copy, f"{side}_type", _DEVICE if memory.device else _HOST)
                    setattr(copy, f"{side}_{'device' if memory.device else 'host'}", memory.address)
                    setattr(copy, f"{side}_pitch", memory.block)
                    setattr(copy, f"{side}_height", memory.blocks)
                self._require("cuMemcpy3D_v2", ctypes.byref(copy))

    def copy_bytes(self, source: int, target: int, size: int) -> None:
        """Copy contiguous memory of the GPU."""
        with self._work():
            self._require("cuMemcpyDtoD_v2", *map(ctypes.c_void_p, (target, source)), ctypes.c_size_t(size))

    def close(self) -> None:
        """Give up the GPU."""
        self._driver.cuDevicePrimaryCtxRelease_v2(self._device)

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Make the context current for this OS thread in the block, and wait for the work at its end."""
        self._require("cuCtxPushCurrent_v2", self._context)
        try:
            yield
            self._require("cuCtxSynchronize")
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _require(self, name: str, *arguments: Any) -> None:
        if (code := getattr(self._driver, name)(*arguments)) != 0:
            raise RuntimeError(f"the NVIDIA driver failed in {name} with code {code}")


def device_memory() -> DeviceMemory:
    """The memory of the first GPU."""
    return DeviceMemory(ctypes.CDLL(_DRIVER))
