"""Events: what the decode loop reports of a request's threads while they write."""

from __future__ import annotations

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
