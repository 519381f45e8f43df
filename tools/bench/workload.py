"""Workload: which requests clients send when, how they behave, and what came back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import numpy as np

from spaceport.graphs.contract.faults import OptionFault

# cancel: close the connection while the answer comes; drop: reset it, as a client that crashes; slow: pause while reading.
Behaviour = Literal["read", "cancel", "drop", "slow"]
_LEAVES: tuple[Behaviour, ...] = ("cancel", "drop")
_EVENTS = 24  # a client that leaves does so before this many events of text
REFUSED = (429, 503)
_MOST_PAUSE = 10.0  # seconds that a refused client waits at most


@dataclass(frozen=True)
class Workload:
    """The requests of one run."""

    clients: int = 8  # requests at a time; each client sends its next request when it has its answer
    requests: int | None = None  # requests that are sent; None: until `seconds` have passed
    seconds: float | None = None
    rate: float | None = None  # mean requests per second, as a Poisson process; `clients` does not count then
    max_tokens: int = 64
    cancelled: float = 0.0  # share of requests whose client closes its connection early
    dropped: float = 0.0  # share whose client resets its connection
    slow: float = 0.0  # share whose client pauses after each event
    unstreamed: float = 0.0  # share that asks for the whole answer
    drafts: bool = True  # without them, the work of a request does not depend on what was learned about drafts
    pause: float = 0.05  # seconds that a slow client pauses
    ramp: float = 0.0  # seconds in which the clients start, one after the other; else all prefill at once, and again
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.requests is None) == (self.seconds is None):
            raise OptionFault("a run has requests and seconds, or neither: expected one of --requests and --seconds")
        for name in ("clients", "requests", "max_tokens"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise OptionFault(f"{name} is {count}: expected at least 1")
        for name in ("seconds", "rate", "pause"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise OptionFault(f"{name} is {value}: expected a number above 0")
        if not self.ramp >= 0:
            raise OptionFault(f"ramp is {self.ramp}: expected seconds of at least 0")
        shares = {name: getattr(self, name) for name in ("cancelled", "dropped", "slow", "unstreamed")}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise OptionFault(f"{name} is {share}: expected a share from 0 to 1")
        if (together := shares["cancelled"] + shares["dropped"] + shares["slow"]) > 1:
            raise OptionFault(f"cancelled, dropped and slow add up to {together:g}: expected at most 1")


@dataclass(frozen=True)
class PlannedRequest:
    """A request to send, and how its client behaves."""

    number: int
    prompt: int  # index of its prompt
    behaviour: Behaviour
    streamed: bool
    events: int  # events of text after which a client leaves
    gap: float  # seconds since the request before, if requests arrive at random

    @property
    def leaves(self) -> bool:
        """Whether the client leaves before the answer is complete."""
        return self.behaviour in _LEAVES


def planned(workload: Workload, prompts: int, first: int = 0) -> Iterator[PlannedRequest]:
    """The requests of a run in order, the same for each service; the prompts repeat in order, from number `first` on."""
    random = np.random.default_rng(workload.seed)
    shares = {"cancel": workload.cancelled, "drop": workload.dropped, "slow": workload.slow}
    number = 0
    while workload.requests is None or number < workload.requests:
        chance, streamed = random.random(), random.random() >= workload.unstreamed
        events, gap = int(random.integers(0, _EVENTS)), float(random.exponential(1.0))
        yield PlannedRequest(
            number,
            (first + number) % prompts,
            _behaviour(chance, shares),
            streamed,
            events,
            gap / workload.rate if workload.rate else 0.0,
        )
        number += 1


def _behaviour(chance: float, shares: dict[str, float]) -> Behaviour:
    """The behaviour for a random number between 0 and 1."""
    for name, share in shares.items():
        if chance < share:
            return name  # type: ignore[return-value]
        chance -= share
    return "read"


@dataclass
class LoadExchange:
    """One request and its answer; times are seconds since the run began."""

    number: int
    prompt: int  # index of its prompt
    behaviour: str
    streamed: bool
    started: float = 0.0
    ended: float = 0.0
    status: int = 0  # HTTP status; 0: the connection failed
    text_times: list[float] = field(default_factory=list)  # when events with text came
    text: str = ""
    token_ids: list[int] | None = None  # None: the service reports none
    tokens: int | None = None  # None: the service reports none
    ending: str | None = None  # finish_reason; None: the answer is incomplete
    drafts: dict[str, Any] | None = None  # metrics.speculative_decoding
    error: str | None = None
    retry_after: float | None = None  # seconds, of a refused request

    @property
    def outcome(self) -> str:
        """answered, left, refused or failed."""
        if self.status in REFUSED:
            return "refused"
        if self.error is not None or self.status != 200:
            return "failed"
        if self.ending is not None:
            return "answered"
        return "left" if self.behaviour in ("cancel", "drop") else "failed"

    @property
    def token_count(self) -> int:
        """Tokens that came; events with text, if the service counts no tokens."""
        return len(self.text_times) if self.tokens is None else self.tokens

    @property
    def first_token_seconds(self) -> float | None:
        """Time to the first text of a stream."""
        return self.text_times[0] - self.started if self.streamed and self.text_times else None

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time between the tokens of a complete stream."""
        if self.outcome != "answered" or not self.streamed or self.token_count < 2 or len(self.text_times) < 2:
            return None
        return (self.text_times[-1] - self.text_times[0]) / (self.token_count - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events with text."""
        return [later - earlier for earlier, later in zip(self.text_times, self.text_times[1:], strict=False)]


def exchange_of(request: PlannedRequest, started: float) -> LoadExchange:
    """The exchange of a request that is being sent."""
    return LoadExchange(request.number, request.prompt, request.behaviour, request.streamed, started)


# Sends a request of a client; what the client sees goes into the exchange.
Send = Callable[[int, PlannedRequest, LoadExchange], Awaitable[None]]
# What sends the requests of a run: connections are closed at its end.
OpenSender = Callable[["Clock"], AbstractAsyncContextManager[Send]]


@dataclass(frozen=True)
class LoadRun:
    """All exchanges of a run."""

    exchanges: list[LoadExchange]
    seconds: float  # until the last answer


class Clock:
    """Seconds since a run began."""

    def __init__(self) -> None:
        self._started = perf_counter()

    def __call__(self) -> float:
        return perf_counter() - self._started


async def run_load(workload: Workload, requests: Iterator[PlannedRequest], open_sender: OpenSender) -> LoadRun:
    """Send the requests; returns when the last one has its answer."""
    clock = Clock()
    async with open_sender(clock) as send:
        run = _RunningLoad(workload, requests, send, clock)
        if workload.rate is None:
            await asyncio.gather(*(run.client(number) for number in range(workload.clients)))
        else:
            await run.arrivals()
        return LoadRun(run.exchanges, clock())


class _RunningLoad:
    """A run while it lasts."""

    def __init__(self, workload: Workload, requests: Iterator[PlannedRequest], send: Send, clock: Clock) -> None:
        self.exchanges: list[LoadExchange] = []
        self._workload = workload
        self._requests = requests
        self._send = send
        self._clock = clock

    async def client(self, number: int) -> None:
        """Send one request after the other; after a refusal, wait as long as the service asks for."""
        await asyncio.sleep(self._workload.ramp * number / self._workload.clients)
        while (request := self._next()) is not None:
            exchange = await self._exchange(number, request)
            if exchange.retry_after:
                await asyncio.sleep(min(exchange.retry_after, self._remaining(), _MOST_PAUSE))

    async def arrivals(self) -> None:
        """Send requests at random times, however many are being answered."""
        tasks: set[asyncio.Task[LoadExchange]] = set()
        due = 0.0
        while (request := self._next()) is not None:
            due += request.gap
            await asyncio.sleep(max(0.0, due - self._clock()))
            tasks.add(asyncio.create_task(self._exchange(request.number, request)))
        await asyncio.gather(*tasks)

    async def _exchange(self, client: int, request: PlannedRequest) -> LoadExchange:
        exchange = exchange_of(request, self._clock())
        self.exchanges.append(exchange)
        await self._send(client, request, exchange)
        exchange.ended = self._clock()
        return exchange

    def _next(self) -> PlannedRequest | None:
        """The next request; None at the end of the run."""
        return next(self._requests, None) if self._remaining() > 0 else None

    def _remaining(self) -> float:
        limit = self._workload.seconds
        return _MOST_PAUSE if limit is None else limit - self._clock()
