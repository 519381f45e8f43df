"""Watchdog: notices engine calls that do not return."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from time import monotonic

_CHECKS = 8  # per time limit
_LONGEST_CHECK = 1.0  # seconds between two checks


class Heartbeat:
    """When the worker last made progress; `age` may be read from any OS thread."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._last: float | None = None

    @property
    def age(self) -> float | None:
        """Seconds since the last progress; None: the worker has nothing to do."""
        last = self._last
        return None if last is None else max(0.0, self._clock() - last)

    def beat(self) -> None:
        """Note progress: a round begins, or an engine call has returned."""
        self._last = self._clock()

    def rest(self) -> None:
        """Note that there is nothing to do."""
        self._last = None


class Watchdog:
    """An OS thread that calls a function, once, when a heartbeat is older than a limit in seconds."""

    def __init__(self, heartbeat: Heartbeat, limit: float, on_stall: Callable[[float], None]) -> None:
        self._heartbeat, self._limit, self._on_stall = heartbeat, limit, on_stall
        self._stopped = Event()
        self._thread = Thread(target=self._watch, name="spaceport-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(_LONGEST_CHECK, self._limit / _CHECKS)):
            age = self._heartbeat.age
            if age is not None and age > self._limit:
                self._on_stall(age)
                return
