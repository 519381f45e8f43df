"""Submission: a request on its way into the queue, from the moment it is handed over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from time import monotonic, perf_counter
from typing import Generic, Literal, TypeVar

from spaceport.runtime.isolation import DeadlinePassed
from spaceport.runtime.scheduling.task import Task

EarlyEnding = Literal["cancelled", "deadline"]  # of a request that was not submitted
Admitted = TypeVar("Admitted", bound=Task)


class Submission(Generic[Admitted]):
    """A request that is being admitted, until it is submitted, fails, or ends before that; any OS thread may use it."""

    def __init__(
        self,
        admit: Callable[[], Admitted],
        submit: Callable[[Admitted], None],
        leave: Callable[[], None],
        deadline: float | None = None,
        on_settled: Callable[[], None] = lambda: None,
    ) -> None:
        """Describe a request.

        - `admit`: Tokenizes the prompt and checks the options.
        - `submit`: Puts the admitted request into the queue.
        - `leave`: Gives up the reservation in the queue of a request that is not submitted.
        - `deadline`: When it ends, in seconds of the monotonic clock.
        - `on_settled`: Called once, after it was submitted, failed or ended.
        """
        self._admit: Callable[[], Admitted] | None = admit
        self._submit = submit
        self._leave = leave
        self._deadline = deadline
        self._on_settled = on_settled
        self._lock = Lock()  # of the decision whether it is submitted
        self._began = perf_counter()
        self.cancelled = False  # also set without the lock, by a reader that is garbage
        self.task: Admitted | None = None  # once it is submitted
        self.fault: BaseException | None = None  # why it was not submitted
        self.ending: EarlyEnding | None = None  # why it ended before it was submitted

    @property
    def settled(self) -> bool:
        """Whether it was submitted, failed, or ended."""
        return self.task is not None or self.fault is not None or self.ending is not None

    @property
    def submitted(self) -> Admitted:
        """The submitted request."""
        assert self.task is not None
        return self.task

    def run(self) -> None:
        """Admit and submit it, unless it has ended."""
        admit, self._admit = self._admit, None
        ending: EarlyEnding | None = None
        fault: BaseException | None = None
        try:
            if self.cancelled:
                ending = "cancelled"
            elif self._deadline is not None and monotonic() >= self._deadline:
                ending = "deadline"
            elif admit is not None and not self.settled:
                self._hand_over(admit())
        except DeadlinePassed:
            ending = "deadline"
        except BaseException as error:  # noqa: BLE001  (its reader gets it)
            fault = error
        if self.task is None:
            self._leave()
            self._settle(ending or "cancelled", fault)
        else:
            self._report()

    def forget(self) -> None:
        """Give up the prompt and the reservation in the queue of a request that ended before its turn."""
        self._admit = None
        self._leave()

    def cancel(self) -> None:
        """End it, also if it was submitted."""
        self.cancelled = True
        self.end("cancelled")
        if self.task is not None:
            self.task.cancelled = True

    def end(self, ending: EarlyEnding) -> None:
        """End it, unless it is settled."""
        self._settle(ending)

    def fail(self, error: BaseException) -> None:
        """Fail it with this error, unless it is settled."""
        self._settle(None, error)

    def _settle(self, ending: EarlyEnding | None, fault: BaseException | None = None) -> None:
        with self._lock:
            if self.settled:
                return
            self.ending, self.fault = None if fault else ending, fault
        self._report()

    def _hand_over(self, task: Admitted) -> None:
        with self._lock:
            if self._is_over():
                return
            task.submitted = self._began
            self.task = task  # before the worker reports anything
            try:
                self._submit(task)
            except BaseException:
                self.task = None
                raise
        if self.cancelled:
            task.cancelled = True

    def _is_over(self) -> bool:
        """Whether nobody waits for it; another OS thread may cancel it at any time."""
        return self.settled or self.cancelled

    def _report(self) -> None:
        with suppress(Exception):  # of one reader, such as a closed event loop
            self._on_settled()
