"""Interrupts: handle SIGINT and SIGTERM around work that must not be interrupted halfway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts_handled(handler: Callable[[int], object]) -> Iterator[None]:
    """Call `handler` with the signal number on each interrupt; without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {kind: signal.signal(kind, lambda number, frame: handler(number)) for kind in _SIGNALS}
    try:
        yield
    finally:
        for kind, old_handler in previous.items():
            signal.signal(kind, old_handler)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Delay interrupts until the block has ended."""
    received: list[int] = []
    try:
        with interrupts_handled(received.append):
            yield
    finally:
        if received:
            signal.raise_signal(received[0])


@contextmanager
def interrupts_recorded() -> Iterator[list[int]]:
    """A list that receives the interrupts during the block, which may poll it; raises KeyboardInterrupt at its end."""
    received: list[int] = []
    try:
        with interrupts_handled(received.append):
            yield received
    finally:
        if received:
            raise KeyboardInterrupt
