"""Runtimes: one for each mode, all on one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from spaceport.runtime.session import Runtime
from spaceport.tools.bench.decode.modes import DecodeMode


@contextmanager
def mode_runtimes(modes: Sequence[DecodeMode], open_runtime: Callable[[], Runtime]) -> Iterator[dict[str, Runtime]]:
    """A runtime for each mode by name; none shares what it learns about acceptance."""
    found: dict[str, Runtime] = {}
    try:
        for mode in modes:
            found[mode.name] = open_runtime()
        yield found
    finally:
        for runtime in found.values():
            runtime.close()
