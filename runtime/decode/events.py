"""Events: what the decode loop reports of a request's threads while they write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from spaceport.runtime.decode.threads import Thread


class Listener(Protocol):
    """Receives the tokens that the threads of a request write, and decides where a stop string ends them."""

    def on_token(self, thread: Thread, token: int, drafted: bool) -> bool:
        """A thread has one more token; returns whether its text ends with it."""

    def on_fork(self, parent: Thread, child: Thread) -> None:
        """A child thread begins behind the [Fork] that its parent has just written."""

    def on_end(self, thread: Thread) -> None:
        """A thread has ended."""

    def is_cut_off(self, thread: Thread) -> bool:
        """Whether everything that the thread may still write comes after a stop string."""


class NullListener:
    """A listener that ignores all events."""

    def on_token(self, thread: Thread, token: int, drafted: bool) -> bool:
        return False

    def on_fork(self, parent: Thread, child: Thread) -> None:
        pass

    def on_end(self, thread: Thread) -> None:
        pass

    def is_cut_off(self, thread: Thread) -> bool:
        return False


# A token of a thread and whether it was drafted; a child thread that begins; None: the thread has ended.
Event = tuple[Thread, int | Thread | None, bool]


class EventLog:
    """A listener that keeps the events for one that runs elsewhere; it ends no text."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    @property
    def count(self) -> int:
        """Events since the last `take`."""
        return len(self._events)

    def on_token(self, thread: Thread, token: int, drafted: bool) -> bool:
        self._events.append((thread, token, drafted))
        return False

    def on_fork(self, parent: Thread, child: Thread) -> None:
        self._events.append((parent, child, False))

    def on_end(self, thread: Thread) -> None:
        self._events.append((thread, None, False))

    def is_cut_off(self, thread: Thread) -> bool:
        return False

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


def replay(events: Iterable[Event], listener: Listener) -> None:
    """Report logged events to a listener, which sees threads as they are by now."""
    for thread, what, drafted in events:
        if what is None:
            listener.on_end(thread)
        elif isinstance(what, int):
            listener.on_token(thread, what, drafted)
        else:
            listener.on_fork(thread, what)
