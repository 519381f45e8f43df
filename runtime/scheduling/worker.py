"""The OS thread that runs the scheduler's rounds, and the one that notices engine calls that do not return."""

from __future__ import annotations

import atexit
import logging
import os
from dataclasses import dataclass
from threading import Condition, Event, Thread

from spaceport.graphs.contract.faults import SpaceportError
from spaceport.runtime.decode.sequence_group import SequenceGroup
from spaceport.runtime.engine import EngineFault
from spaceport.runtime.scheduling.request import Request
from spaceport.runtime.scheduling.scheduler import Abandoned, Scheduler

_PATIENCE = 5.0  # idle seconds after which the OS thread ends; the next request starts another
_PAUSE = 0.01  # seconds until the next round, if all requests wait for their readers
_CHECKS = 8  # of the watchdog per time limit
_LONGEST_CHECK = 1.0  # seconds between two checks

_log = logging.getLogger("spaceport.runtime")


class RuntimeClosed(SpaceportError, RuntimeError):
    """The runtime was closed before the request ended, or before it was submitted; or this is a forked process."""


def check_process(process: int) -> None:
    """Raise in a process that was forked from the one with this id: the worker thread does not exist there."""
    if os.getpid() != process:
        raise RuntimeClosed("the runtime was opened by the process that this one was forked from: open it here")


@dataclass(frozen=True)
class RuntimeStatus:
    """State of a runtime at one moment.

    - `healthy`: Whether it can run requests; False after an engine call exceeded `call_timeout`: open the bundle again.
    - `closed`: Whether `close` was called.
    - `active_requests`: Number of requests that have KV slots.
    - `max_requests`: Maximum number of active requests.
    - `queued_requests`: Number of requests that wait.
    - `queue_limit`: Maximum number of requests that wait.
    - `kv_slots_used`: KV slots that active requests hold.
    - `kv_slots`: KV slots of all requests that can be active.
    - `live_threads`: Threads of active requests that decode.
    - `queued_threads`: Threads of active requests that wait for others to end.
    - `heartbeat_age`: Seconds since the worker thread last made progress; None while it has nothing to do.
    - `tokens`: Number of tokens generated since the runtime was opened.
    - `tokens_per_second`: Generated tokens per second over the last 10 seconds.
    - `ended_requests`: Number of requests that have ended since the runtime was opened, failed ones included.
    - `failed_requests`: Number of requests that ended with an error.
    - `cached_tokens`: Tokens in the KV buffers of ended requests that later requests may reuse.
    - `cache_queried_tokens`: Prompt tokens of all requests that were compared with the prefix cache.
    - `cache_hit_tokens`: Of these, the tokens whose KV rows were reused.
    - `cache_hits`: Number of requests that reused KV rows.
    - `cache_evictions`: Number of prefixes that were overwritten by a request with another prompt.
    """

    healthy: bool
    closed: bool
    active_requests: int
    max_requests: int
    queued_requests: int
    queue_limit: int
    kv_slots_used: int
    kv_slots: int
    heartbeat_age: float | None
    tokens: int
    tokens_per_second: float
    ended_requests: int
    failed_requests: int
    cached_tokens: int = 0
    cache_queried_tokens: int = 0
    cache_hit_tokens: int = 0
    cache_hits: int = 0
    cache_evictions: int = 0
    live_threads: int = 0
    queued_threads: int = 0


class Worker:
    """Runs rounds while there are requests, which may be submitted from any OS thread."""

    def __init__(self, scheduler: Scheduler, call_timeout: float | None = None) -> None:
        self._scheduler = scheduler
        self._call_timeout = call_timeout  # seconds
        self._change = Condition()
        self._thread: Thread | None = None
        self._over = Event()  # set when the OS thread has ended, or when nobody waits for it any more
        self._closing = False
        self._stalled: SpaceportError | None = None  # why it cannot run requests any more
        self._process = os.getpid()

    def check_process(self) -> None:
        """Raise in a forked process, before any lock is taken: its holder may not exist there."""
        check_process(self._process)

    def enter(self, request: Request) -> None:
        """Count a request in the queue that will be prepared, and then submitted."""
        self.check_process()
        with self._change:
            self._check_open()
            self._scheduler.enter(request)

    def leave(self, request: Request) -> None:
        """Count a request no longer that will not be submitted."""
        self._scheduler.queue.leave(request)

    def submit(self, request: Request, sequences: SequenceGroup) -> None:
        """Submit a prepared request, unless it has ended."""
        self.check_process()
        with self._change:
            self._check_open()
            if self._thread is None:
                self._thread = self._begin()
            self._scheduler.submit(request, sequences)
            self._change.notify()

    @property
    def preparing(self) -> list[Request]:
        """The requests that are being prepared; none in a forked process, where nothing prepares them."""
        return self._scheduler.queue.preparing() if os.getpid() == self._process else []

    def status(self) -> RuntimeStatus:
        """The state at this moment."""
        self.check_process()
        scheduler, engine = self._scheduler, self._scheduler.engine
        active, cache = scheduler.active, scheduler.buffers.cache
        return RuntimeStatus(
            healthy=self._stalled is None,
            closed=self._closing,
            active_requests=len(active),
            max_requests=engine.requests,
            queued_requests=len(scheduler.queue),
            queue_limit=scheduler.queue.limit,
            kv_slots_used=sum(sequences.slots.held for sequences in active),
            kv_slots=engine.requests * engine.capacity,
            heartbeat_age=scheduler.heartbeat_age,
            tokens=scheduler.meter.tokens,
            tokens_per_second=scheduler.meter.tokens_per_second,
            ended_requests=scheduler.ended,
            failed_requests=scheduler.failed,
            cached_tokens=scheduler.buffers.cached_tokens,
            cache_queried_tokens=cache.queried_tokens,
            cache_hit_tokens=cache.hit_tokens,
            cache_hits=cache.hits,
            cache_evictions=cache.evictions,
            live_threads=sum(len(sequences.live) for sequences in active),
            queued_threads=sum(len(sequences.queue) for sequences in active),
        )

    def close(self, timeout: float | None = None) -> bool:
        """End all requests after the current step; returns whether the engine is idle, so that it can be released.

        After `timeout` seconds, or when the watchdog finds that a call does not return, they fail without waiting for it.
        """
        if os.getpid() != self._process:
            return False
        with self._change:
            self._closing = True
            self._change.notify()
            thread = self._thread
        atexit.unregister(self.close)
        if thread is not None and not self._over.wait(timeout):
            self._stall(f"the runtime was closed, and an engine call did not return within {timeout:g} s", closed=True)
        if self._stalled is not None:
            return False
        if thread is not None:
            thread.join()
        with self._change:
            self._scheduler.fail(RuntimeClosed("the runtime was closed before the completion ended"))
        return True

    def _check_open(self) -> None:
        if self._closing:
            raise RuntimeClosed("the runtime is closed")
        if self._stalled is not None:
            raise EngineFault(str(self._stalled))

    def _begin(self) -> Thread:
        # A daemon thread: a program that ends without closing its runtimes does not wait for their completions. It waits
        # for the current step, since an OS thread inside an engine aborts the process when Python exits.
        self._over = Event()
        thread = Thread(target=self._work, args=(self._over,), name="spaceport", daemon=True)
        thread.start()
        if (limit := self._call_timeout) is not None:
            watch = (limit, self._over)
            Thread(target=self._watch, args=watch, name="spaceport-watchdog", daemon=True).start()
        atexit.register(self.close)
        return thread

    def _work(self, over: Event) -> None:
        try:
            while self._has_work():
                try:
                    if not self._scheduler.round():
                        self._wait(_PAUSE)
                except Abandoned:
                    _log.warning("the engine call has returned after its requests had failed")
                except BaseException as error:  # noqa: BLE001  (fails all requests)
                    self._scheduler.fail(error)
        finally:
            self._scheduler.rest()
            if self._stalled is not None:
                self._scheduler.abandon(self._stalled)  # also what was on its way from the queue to its buffers
            over.set()

    def _watch(self, limit: float, over: Event) -> None:
        """Fail all requests if an engine call does not return for this many seconds."""
        while not over.wait(min(_LONGEST_CHECK, limit / _CHECKS)):
            age = self._scheduler.heartbeat_age
            if age is not None and age > limit:
                self._stall(
                    f"an engine call has not returned for {age:.1f} s, call_timeout is {limit:g} s: open the bundle again, "
                    "or raise call_timeout"
                )
                return

    def _stall(self, reason: str, closed: bool = False) -> None:
        """Fail all requests without the OS thread, which is in a call that does not return."""
        with self._change:
            if self._stalled is not None:
                return
            self._stalled = error = RuntimeClosed(reason) if closed else EngineFault(reason)
        _log.error("%s", reason)
        self._scheduler.abandon(error)
        self._over.set()

    def _wait(self, seconds: float) -> None:
        with self._change:
            if not self._closing:
                self._change.wait(seconds)

    def _has_work(self) -> bool:
        with self._change:
            if not self._closing and not self._scheduler.busy:
                self._scheduler.rest()
                self._change.wait(_PATIENCE)
            if self._closing or self._stalled is not None:
                return False
            if not self._scheduler.busy:
                atexit.unregister(self.close)
                self._thread = None
                return False
            return True
