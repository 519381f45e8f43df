"""Opener: a process that opens bundles as a stranger sends them, so that a crash or a hang ends it alone."""

from __future__ import annotations

import os
import resource
from concurrent import futures
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from pathlib import Path

_MEMORY = 5 * 2**29  # bytes of address space
_KERNELS = os.environ.get("TESTED_KERNELS")  # a library with sanitizers, which reserve address space
_PATIENCE = 120.0  # seconds of a case on a busy machine


class Opener:
    """Runs cases in a child process; starts another one after a crash or a hang."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _limit)

    def run(self, folder: Path) -> str:
        """The result of opening a bundle and generating: "tokens …", "refused …", "untyped …", "ended" or "hang"."""
        try:
            return self._pool.submit(_result, folder).result(_PATIENCE)
        except (BrokenProcessPool, futures.TimeoutError) as error:
            self.close()
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), _limit)
            return "ended" if isinstance(error, BrokenProcessPool) else "hang"

    def close(self) -> None:
        """End the child process."""
        for process in active_children():
            process.kill()
        self._pool.shutdown()


def _limit() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # libraries print there
    if _KERNELS is None:
        os.dup2(null, 2)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    else:
        from spaceport.runtime.backends import on_onnxruntime

        on_onnxruntime.library_path = lambda: Path(_KERNELS)


def _bundle(folder: Path) -> str:
    from spaceport.runtime import Decoding, Runtime

    with Runtime.open(folder, threads=1, max_seq_len=64, step_costs="standard") as runtime:
        decoding = Decoding(max_tokens=8, fork=False, timeout=20)
        tokens = runtime.generate("import json\n", decoding).tokens
        if (runtime.bundle.path / "chat_template.jinja").exists():
            tokens += runtime.generate([{"role": "user", "content": "move( a )"}], decoding).tokens
        return f"tokens {runtime.bundle.manifest.files['model.onnx.data'].sha256[:12]} {list(tokens)}"


def _result(folder: Path) -> str:
    from spaceport.runtime import SpaceportError

    try:
        return _bundle(folder)
    except SpaceportError as error:
        return f"refused {type(error).__name__}"
    except BaseException as error:  # noqa: BLE001  (what the campaign looks for)
        return f"untyped {type(error).__name__}: {str(error)[:200]}"
