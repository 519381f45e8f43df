"""What a scheduler tells about its progress: tokens per second, a heartbeat, and log entries about drafts."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from time import monotonic

from spaceport.runtime.decode.draft import REASONS
from spaceport.runtime.decode.sequence_group import Statistics

_log = logging.getLogger("spaceport.runtime")

STOPPED_AFTER = 256  # steps without drafts after which they have stopped
_WINDOW = 10.0  # seconds over which tokens/s are measured
_INTERVAL = 0.25  # minimum seconds between two samples


class DraftLog:
    """Logs once when ended requests have drafted nothing any more, with the usual reason, and when drafts resume."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # drafts that were limited since the last draft, by reason
        self._steps = self._requests = 0  # that drafted nothing since then
        self._stopped = False

    def add(self, request: Statistics) -> None:
        """Count the steps of a request that has ended."""
        if not request.candidate_rows + request.mask_rows:
            if not request.drafts_limited:
                return
            self._requests += 1
            self._steps += request.steps
            for reason, count in request.drafts_limited.items():  # one for each thread and step
                self._seen[reason] = self._seen.get(reason, 0) + count
            if not self._stopped and self._steps >= STOPPED_AFTER:
                self._stopped = True
                reason = max(self._seen, key=self._seen.__getitem__)
                _log.info("the last %s drafted nothing: %s", self._stretch, REASONS[reason])
        elif self._seen:
            if self._stopped:
                _log.info("drafts resumed: the %s before drafted nothing", self._stretch)
            self._seen, self._requests, self._steps, self._stopped = {}, 0, 0, False

    @property
    def _stretch(self) -> str:
        requests = "request" if self._requests == 1 else f"{self._requests} requests"
        return f"{requests} with {self._steps} steps"


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
