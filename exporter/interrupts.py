"""Interrupts: Ctrl-C and requests to end, kept from breaking into work that must not stop half way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts_handled(handler: Callable[[int], object]) -> Iterator[None]:
    """Call `handler` with the signal's number on each interrupt; only the main thread is ever interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {kind: signal.signal(kind, lambda number, frame: handler(number)) for kind in _SIGNALS}
    try:
        yield
    finally:
        for kind, before in kept.items():
            signal.signal(kind, before)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let an interrupt wait until the block has ended."""
    came: list[int] = []
    try:
        with interrupts_handled(came.append):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def interrupts_recorded() -> Iterator[list[int]]:
    """The interrupts so far, for work that asks for them; KeyboardInterrupt is raised when the block ends."""
    came: list[int] = []
    try:
        with interrupts_handled(came.append):
            yield came
    finally:
        if came:
            raise KeyboardInterrupt
