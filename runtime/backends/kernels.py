"""Kernels: the cache of kernels that TensorRT-RTX compiles for each new shape, shared between processes."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

from spaceport.runtime.backends import trust
from spaceport.runtime.backends.private_files import read_private, replace_private

_FOLDER = "kernels"
_DIGEST = 32  # bytes of the SHA-256 at the start of the file


class Kernels:
    """Execution contexts of one engine, which share the kernels that are compiled while it runs."""

    def __init__(self, api: Any, engine: Any, name: str) -> None:
        self._api, self._engine = api, engine
        self._file = trust.state_folder() / _FOLDER / name
        self._cache: Any = None
        self._content = b""
        self._configs: list[Any] = []  # contexts need theirs as long as they live
        if self._compiles:
            self._cache = engine.create_runtime_config().create_runtime_cache()
            self._content = self._read()
            if self._content:
                self._cache.deserialize(
                    self._content
                )  # kernels of another driver or GPU are ignored and compiled again

    def context(self, at_once: bool) -> Any:
        """A context whose memory is given to it. Kernels for a new shape are compiled at once, or beside the work, while
        slower ones serve: a call that is captured has to have its own."""
        strategy = self._api.ExecutionContextAllocationStrategy.USER_MANAGED
        if not self._compiles:
            return self._engine.create_execution_context(strategy)
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        kinds = self._api.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER if at_once else kinds.LAZY
        config.set_runtime_cache(self._cache)
        self._configs.append(config)
        return self._engine.create_execution_context(config)

    def keep(self) -> None:
        """Store the compiled kernels for the next process."""
        if self._cache is None:
            return
        content = bytes(self._cache.serialize())
        if content == self._content:
            return
        with contextlib.suppress(OSError):  # without the file, the next process compiles again
            replace_private(self._file, hashlib.sha256(content).digest() + content)

    def let_go(self) -> None:
        """Release everything of the engine, after its contexts."""
        self._engine = self._cache = None
        self._configs.clear()

    @property
    def _compiles(self) -> bool:
        return hasattr(self._api, "DynamicShapesKernelSpecializationStrategy")

    def _read(self) -> bytes:
        """The stored kernels; empty if there are none, or if their file was damaged or may be another user's."""
        stored = read_private(self._file) or b""
        digest, content = stored[:_DIGEST], stored[_DIGEST:]
        return content if hashlib.sha256(content).digest() == digest else b""
