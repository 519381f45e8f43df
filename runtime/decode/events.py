"""Events: what the decode loop reports about the threads of a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from spaceport.runtime.decode.threads import Thread


class Listener(Protocol):
    """Receives the generated tokens of a request's threads, and decides where a stop string ends them."""

    def on_token(self, thread: Thread, token: int, drafted: bool, source: str | None = None) -> bool:
        """Called after each generated token; returns whether the thread ends with it."""

    def on_fork(self, parent: Thread, child: Thread) -> None:
        """Called when a child thread starts at the [Fork] that its parent has just generated."""

    def on_end(self, thread: Thread) -> None:
        """Called when a thread has ended."""

    def is_cut_off(self, thread: Thread) -> bool:
        """Whether all further text of the thread would come after a stop string."""


class NullListener:
    """A listener that ignores all events."""

    def on_token(self, thread: Thread, token: int, drafted: bool, source: str | None = None) -> bool:
        return False

    def on_fork(self, parent: Thread, child: Thread) -> None:
        pass

    def on_end(self, thread: Thread) -> None:
        pass

    def is_cut_off(self, thread: Thread) -> bool:
        return False


# A thread, what happened (a token, a child thread that starts, None: it ended), whether a token was drafted, and what
# proposed it.
Event = tuple[Thread, int | Thread | None, bool, str | None]


class EventLog:
    """A listener that stores events for another one to replay; it never ends a thread."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    @property
    def count(self) -> int:
        """Events since the last `take`."""
        return len(self._events)

    def on_token(self, thread: Thread, token: int, drafted: bool, source: str | None = None) -> bool:
        self._events.append((thread, token, drafted, source))
        return False

    def on_fork(self, parent: Thread, child: Thread) -> None:
        self._events.append((parent, child, False, None))

    def on_end(self, thread: Thread) -> None:
        self._events.append((thread, None, False, None))

    def is_cut_off(self, thread: Thread) -> bool:
        return False

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


def replay(events: Iterable[Event], listener: Listener) -> None:
    """Report stored events to a listener; it sees the threads in their current state."""
    for thread, what, drafted, source in events:
        if what is None:
            listener.on_end(thread)
        elif isinstance(what, int):
            listener.on_token(thread, what, drafted, source)
        else:
            listener.on_fork(thread, what)
