"""Queue: the requests that wait, from the moment they are handed over until they get KV buffers; bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock

from spaceport.graphs.contract.faults import SpaceportError
from spaceport.runtime.scheduling.task import Task


class QueueFull(SpaceportError, RuntimeError):
    """The queue of waiting requests is full; try again later."""


@dataclass(frozen=True, eq=False)
class Reservation:
    """The reservation in the queue of a request that is being admitted."""

    tokens: int  # prompt tokens, estimated


class RequestQueue:
    """Waiting requests in the order of their submission, those that are being admitted included; any OS thread may use it."""

    def __init__(self, limit: int, most_tokens: int | None = None) -> None:
        self.limit = limit  # requests beyond those that get KV buffers at once
        self._most_tokens = most_tokens  # prompt tokens of all waiting requests; None: any number
        self._waiting: deque[Task] = deque()
        self._reservations: set[Reservation] = set()
        self._lock = Lock()

    def __len__(self) -> int:
        """Number of requests that wait, those that are being admitted included."""
        return len(self._waiting) + len(self._reservations)

    @property
    def ready(self) -> bool:
        """Whether an admitted request waits."""
        return bool(self._waiting)

    def reserve(self, free: int, tokens: int) -> Reservation:
        """A reservation for a request that is being admitted; `free` others get KV buffers at once."""
        with self._lock:
            self._check(free, tokens)
            reservation = Reservation(tokens)
            self._reservations.add(reservation)
        return reservation

    def cancel(self, reservation: Reservation) -> None:
        """Give up the reservation of a request that was not admitted."""
        with self._lock:
            self._reservations.discard(reservation)

    def put(self, task: Task, free: int, reservation: Reservation | None = None) -> None:
        """Add an admitted request, at the cost of its reservation if it has one."""
        tokens = task.request.statistics.prompt_tokens
        with self._lock:
            if reservation is None:
                self._check(free, tokens)
            else:
                self._reservations.discard(reservation)
                self._check_tokens(free, tokens)
            self._waiting.append(task)

    def take(self) -> Task | None:
        """The request that has waited longest."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def take_all(self) -> list[Task]:
        """All admitted requests that wait."""
        with self._lock:
            found, self._waiting = self._waiting, deque()
        return list(found)

    def remove_done(self) -> None:
        """Remove the requests that have ended."""
        with self._lock:
            self._waiting = deque(task for task in self._waiting if not task.done)

    def __iter__(self) -> Iterator[Task]:
        """The admitted requests that wait."""
        with self._lock:
            return iter(list(self._waiting))

    def _check(self, free: int, tokens: int) -> None:
        if len(self) >= self.limit + free:
            raise QueueFull(
                f"{len(self) - free} requests wait already, queue_limit is {self.limit}: try again later, or "
                "raise queue_limit or max_requests"
            )
        self._check_tokens(free, tokens)

    def _check_tokens(self, free: int, tokens: int) -> None:
        """Raise `QueueFull` if all waiting requests have too many prompt tokens; a single one may have any number."""
        if self._most_tokens is None or len(self) <= free:
            return
        count = tokens + sum(task.request.statistics.prompt_tokens for task in self._waiting)
        count += sum(reservation.tokens for reservation in self._reservations)
        if count > self._most_tokens:
            raise QueueFull(
                f"the requests that wait have {count} prompt tokens, queued_prompt_tokens is {self._most_tokens}: try again "
                "later, or raise it in Limits"
            )
