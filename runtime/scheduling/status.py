"""Status: the state of a runtime at one moment, for metrics and health checks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from spaceport.runtime.decode.draft import REASONS
from spaceport.runtime.decode.statistics import Statistics

STOPPED_AFTER = 256  # steps without drafts after which they have stopped
_log = logging.getLogger("spaceport.runtime")
_WINDOW = 10.0  # seconds over which tokens/s are measured
_INTERVAL = 0.25  # minimum seconds between two samples


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


class DraftLog:
    """Logs once when ended requests have drafted nothing any more, with the usual reason, and when drafts resume."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # steps since the last draft, by reason
        self._stopped = False

    def add(self, request: Statistics) -> None:
        """Count the steps of a request that has ended."""
        if not request.candidate_rows + request.mask_rows:
            for reason, count in request.drafts_limited.items():
                self._seen[reason] = self._seen.get(reason, 0) + count
            if not self._stopped and (steps := sum(self._seen.values())) >= STOPPED_AFTER:
                self._stopped = True
                reason = max(self._seen, key=self._seen.__getitem__)
                _log.info("nothing was drafted in %d steps: %s", steps, REASONS[reason])
        elif self._seen:
            if self._stopped:
                _log.info("drafts resumed after %d steps", sum(self._seen.values()))
            self._seen, self._stopped = {}, False


class TokenMeter:
    """Counts generated tokens; one OS thread adds them, any may read."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self.tokens = 0
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)])  # seconds, tokens until then

    def add(self, count: int) -> None:
        """Add generated tokens."""
        now = self._clock()
        if now - self._samples[-1][0] >= _INTERVAL:
            self._samples.append((now, self.tokens))
            while len(self._samples) > 1 and now - self._samples[1][0] > _WINDOW:
                self._samples.popleft()
        self.tokens += count

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over the last seconds."""
        now = self._clock()
        recent = [sample for sample in tuple(self._samples) if now - sample[0] <= _WINDOW]
        if not recent:
            return 0.0
        since, before = recent[0]
        return (self.tokens - before) / max(now - since, _INTERVAL)


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
