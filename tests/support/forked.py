"""Forked: `spaceport` commands in processes that are forked from one that has imported torch."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["spaceport.exporter.to_onnx", "spaceport.training.tuning", "torch._dynamo"])


def started(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """A process that calls a function of a module, whose result is its exit code."""
    process = _FORKED.Process(target=_call, args=(function, arguments))
    process.start()
    return process


def exit_code(process: BaseProcess) -> int:
    """The exit code of a process that ends, or minus the signal that killed it."""
    process.join(500)
    assert process.exitcode is not None, "it does not end"
    return process.exitcode


def _call(function: Callable[..., object], arguments: Sequence[object]) -> None:
    import torch

    from spaceport.exporter.checkpoint import quiet_libraries

    torch.set_num_threads(1)
    quiet_libraries()
    sys.exit(function(*arguments))  # type: ignore[arg-type]
