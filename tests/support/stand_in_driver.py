"""A stand-in for NVIDIA's driver, whose device memory is the memory of this process."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

from spaceport.runtime.backends.device_memory import DeviceMemory
from spaceport.runtime.backends.on_cuda import DeviceEngine
from spaceport.runtime.backends.on_onnxruntime import open_selection, open_session, session_options
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import EngineOptions


class StandInDriver:
    """The functions of libcuda that zero and copy memory; `calls` counts them."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.current = 0  # contexts on the stack
        self.broken: str | None = None  # a function that fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls[name] += 1
            self.current += {"cuCtxPushCurrent_v2": 1, "cuCtxPopCurrent_v2": -1}.get(name, 0)
            if name == self.broken:
                return 700
            if name == "cuMemsetD8_v2":
                address, value, size = (argument.value for argument in arguments)
                ctypes.memset(address, value, size)
            if name == "cuMemcpy3D_v2":
                self._copy(arguments[0]._obj)
            return 0

        return call

    @staticmethod
    def _copy(copy: Any) -> None:
        assert ctypes.sizeof(copy) == 200  # as in cuda.h for 64 bits
        starts, strides = [], []
        for side in ("source", "target"):
            host = getattr(copy, f"{side}_type") == 1
            starts.append(getattr(copy, f"{side}_host" if host else f"{side}_device"))
            strides.append((getattr(copy, f"{side}_pitch"), getattr(copy, f"{side}_height")))
            assert strides[-1][0] >= copy.width, "the driver refuses overlapping blocks"
            assert strides[-1][1] >= copy.height
        for plane in range(copy.depth):
            for block in range(copy.height):
                source, target = (
                    start + (plane * height + block) * pitch
                    for start, (pitch, height) in zip(starts, strides, strict=True)
                )
                ctypes.memmove(target, source, copy.width)


def stand_in_memory(driver: StandInDriver | None = None) -> DeviceMemory:
    return DeviceMemory(driver or StandInDriver())


def engine_on_cpu(bundle: Bundle, options: EngineOptions) -> DeviceEngine:
    """The engine of GPUs, with memory and session of the CPU."""
    providers = ["CPUExecutionProvider"]
    session, selection = open_session(bundle, session_options(1), providers), open_selection(bundle, providers)
    signature = bundle.manifest.signature
    return DeviceEngine(session, signature, options, "cpu", "cpu", stand_in_memory(), selection=selection)
