"""Load run: sends the requests of a workload, with clients that take turns or at random times."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from time import perf_counter

from spaceport.tools.bench.serve.exchange import Exchange, exchange_of
from spaceport.tools.bench.serve.workload import PlannedRequest, Workload

# Sends a request of a client; what the client sees goes into the exchange.
Send = Callable[[int, PlannedRequest, Exchange], Awaitable[None]]
# What sends the requests of a run: connections are closed at its end.
OpenSender = Callable[["Clock"], AbstractAsyncContextManager[Send]]
_MOST_PAUSE = 10.0  # seconds that a refused client waits at most


@dataclass(frozen=True)
class LoadRun:
    """All exchanges of a run."""

    exchanges: list[Exchange]
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
        run = _Run(workload, requests, send, clock)
        if workload.rate is None:
            await asyncio.gather(*(run.client(number) for number in range(workload.clients)))
        else:
            await run.arrivals()
        return LoadRun(run.exchanges, clock())


class _Run:
    """A run while it lasts."""

    def __init__(self, workload: Workload, requests: Iterator[PlannedRequest], send: Send, clock: Clock) -> None:
        self.exchanges: list[Exchange] = []
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
        tasks: set[asyncio.Task[Exchange]] = set()
        due = 0.0
        while (request := self._next()) is not None:
            due += request.gap
            await asyncio.sleep(max(0.0, due - self._clock()))
            tasks.add(asyncio.create_task(self._exchange(request.number, request)))
        await asyncio.gather(*tasks)

    async def _exchange(self, client: int, request: PlannedRequest) -> Exchange:
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
