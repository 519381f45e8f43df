"""Task: a request in the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from time import perf_counter

from spaceport.runtime.decode.request import Request

_numbers = count(1)


@dataclass(eq=False, kw_only=True)
class Task:
    """A request from its submission to its end; subclasses handle its progress."""

    request: Request
    deadline: float | None = None  # seconds of the scheduler's clock
    cancelled: bool = False  # set from any OS thread
    # Set by the scheduler only:
    index: int | None = None  # index of its KV buffers in the engine; None: it still waits
    leader: Task | None = (
        None  # a running request that computes the beginning of the prompt for both; None: it waits for none
    )
    common: int = 0  # number of prompt tokens for which it waits
    fault: BaseException | None = None  # why it failed
    done: bool = False
    submitted: float = field(default_factory=perf_counter)
    number: int = field(default_factory=lambda: next(_numbers))  # of the process, for log entries

    @property
    def paused(self) -> bool:
        """Whether it generates nothing until its reader has read more."""
        return False

    def on_progress(self) -> None:
        """Called after each step and at the end; `done` is set in the last call.

        If it raises before that, the request fails with the error and it is called once more.
        """
