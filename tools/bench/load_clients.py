"""Clients of a service under load: which requests they send when, how they read the answers, and when they leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import numpy as np

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.text.prompt import Prompt

# cancel: close the connection while the answer comes; drop: reset it, as a client that crashes; slow: pause while reading.
Behaviour = Literal["read", "cancel", "drop", "slow"]
_LEAVES: tuple[Behaviour, ...] = ("cancel", "drop")
_EVENTS = 24  # a client that leaves does so before this many events of text
REFUSED = (429, 503)
_MOST_PAUSE = 10.0  # seconds that a refused client waits at most
_SMALL = 4096  # bytes that the system and the reader buffer for a slow client
_LIMIT = 1 << 20  # bytes of one line
_TIMEOUT = 300.0  # seconds for one answer


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


# Sends a request of a client; what the client sees goes into the exchange.
Send = Callable[[int, PlannedRequest, LoadExchange], Awaitable[None]]


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


async def run_load(workload: Workload, requests: Iterator[PlannedRequest], send: Send, clock: Clock) -> LoadRun:
    """Send the requests; returns when the last one has its answer."""
    exchanges: list[LoadExchange] = []

    def remaining() -> float:
        return _MOST_PAUSE if workload.seconds is None else workload.seconds - clock()

    def following() -> PlannedRequest | None:
        """The next request; None at the end of the run."""
        return next(requests, None) if remaining() > 0 else None

    async def exchange(client: int, request: PlannedRequest) -> LoadExchange:
        sent = LoadExchange(request.number, request.prompt, request.behaviour, request.streamed, clock())
        exchanges.append(sent)
        await send(client, request, sent)
        sent.ended = clock()
        return sent

    async def client(number: int) -> None:
        """Send one request after the other; after a refusal, wait as long as the service asks for."""
        await asyncio.sleep(workload.ramp * number / workload.clients)
        while (request := following()) is not None:
            sent = await exchange(number, request)
            if sent.retry_after:
                await asyncio.sleep(min(sent.retry_after, remaining(), _MOST_PAUSE))

    if workload.rate is None:
        await asyncio.gather(*(client(number) for number in range(workload.clients)))
    else:  # at random times, however many are being answered
        tasks: set[asyncio.Task[LoadExchange]] = set()
        due = 0.0
        while (request := following()) is not None:
            due += request.gap
            await asyncio.sleep(max(0.0, due - clock()))
            tasks.add(asyncio.create_task(exchange(request.number, request)))
        await asyncio.gather(*tasks)
    return LoadRun(exchanges, clock())


class BadResponse(OSError):
    """A response that is no HTTP/1.1, or ends early."""


@dataclass(frozen=True)
class Address:
    """Where a service listens."""

    host: str
    port: int
    prefix: str  # path before /v1

    @property
    def url(self) -> str:
        """The address as a URL."""
        return f"http://{self.host}:{self.port}{self.prefix}"


@dataclass(frozen=True)
class Head:
    """Status and headers of a response; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]


class Connection:
    """An open connection to a service, used for one request at a time."""

    def __init__(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._address = address
        self._reader = reader
        self._writer = writer
        self._head = Head(0, {})

    @classmethod
    async def open(cls, address: Address, slow: bool = False) -> Connection:
        """A new connection; that of a slow client has small buffers, so that the service notices."""
        if not slow:
            streams = await asyncio.open_connection(address.host, address.port, limit=_LIMIT)
            return cls(address, *streams)
        own = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL)
        own.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(own, (address.host, address.port))
        except OSError:
            own.close()
            raise
        return cls(address, *await asyncio.open_connection(sock=own, limit=_SMALL))

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Head:
        """Send a request and read the head of its response."""
        lines = [
            f"{method} {self._address.prefix}{path} HTTP/1.1",
            f"host: {self._address.host}:{self._address.port}",
            f"content-length: {len(body)}",
            "content-type: application/json",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        self._writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await self._writer.drain()
        self._head = await self._read_head()
        return self._head

    async def parts(self) -> AsyncIterator[bytes]:
        """The body of the response as it comes."""
        if self._head.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._line()).split(b";")[0], 16):
                yield (await self._exactly(size + 2))[:-2]
            await self._line()
        elif (length := int(self._head.headers.get("content-length", "0"))) > 0:
            yield await self._exactly(length)

    async def body(self) -> bytes:
        """The whole body of the response."""
        return b"".join([part async for part in self.parts()])

    async def lines(self) -> AsyncIterator[bytes]:
        """The lines of the body as they come."""
        rest = b""
        async for part in self.parts():
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                yield line

    @property
    def reusable(self) -> bool:
        """Whether another request can be sent."""
        return self._head.headers.get("connection", "").lower() != "close" and not self._reader.at_eof()

    async def close(self, reset: bool = False) -> None:
        """Close the connection; with `reset`, without the farewell of TCP, as when a client crashes."""
        if reset and (own := self._writer.get_extra_info("socket")) is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _read_head(self) -> Head:
        version, _, rest = (await self._line()).decode("latin-1").partition(" ")
        if not version.startswith("HTTP/1.1"):
            raise BadResponse(f"the response begins with {version[:20]!r}: expected HTTP/1.1")
        headers = {}
        while line := await self._line():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return Head(int(rest[:3]), headers)

    async def _line(self) -> bytes:
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise BadResponse("the connection was closed before the response was complete")
        return line.rstrip(b"\r\n")

    async def _exactly(self, count: int) -> bytes:
        try:
            return await self._reader.readexactly(count)
        except asyncio.IncompleteReadError as error:
            raise BadResponse("the connection was closed before the response was complete") from error


@dataclass(frozen=True)
class Target:
    """A model of a service."""

    address: Address
    model: str
    key: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)  # further fields of its requests

    @property
    def headers(self) -> dict[str, str]:
        """Headers of all requests."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


class HttpClients:
    """The clients of a run over HTTP: a connection for each, reused while the service allows it."""

    def __init__(self, target: Target, workload: Workload, prompts: Sequence[Prompt], clock: Clock) -> None:
        self._target = target
        self._workload = workload
        self._prompts = prompts
        self._clock = clock
        self._idle: dict[int, Connection] = {}  # by client

    async def send(self, client: int, request: PlannedRequest, exchange: LoadExchange) -> None:
        """Send a request and read its answer as the client does."""
        connection = None
        complete = False
        try:
            connection = await self._connection(client, request)
            complete = await asyncio.wait_for(self._answer(connection, request, exchange), _TIMEOUT)
        except asyncio.TimeoutError:
            exchange.error = f"no answer within {_TIMEOUT:g} s"
        except (OSError, ValueError, KeyError, IndexError) as error:
            exchange.error = f"{type(error).__name__}: {error}"
        if connection is None:
            return
        if complete and connection.reusable and request.behaviour == "read":
            self._idle[client] = connection
        else:
            await connection.close(reset=request.behaviour == "drop")

    async def close(self) -> None:
        """Close the connections that wait for another request."""
        for connection in self._idle.values():
            await connection.close()

    async def _connection(self, client: int, request: PlannedRequest) -> Connection:
        idle = self._idle.pop(client, None)
        if idle is not None and idle.reusable and request.behaviour != "slow":
            return idle
        if idle is not None:
            await idle.close()
        return await Connection.open(self._target.address, slow=request.behaviour == "slow")

    async def _answer(self, connection: Connection, request: PlannedRequest, exchange: LoadExchange) -> bool:
        """Whether the answer was read to its end."""
        path, body = _body(self._target, self._prompts[request.prompt], request, self._workload)
        work = connection.request("POST", path, body, self._target.headers)
        if request.leaves and not request.streamed:  # leaves while the answer is generated
            try:
                head = await asyncio.wait_for(work, request.events * self._workload.pause)
            except asyncio.TimeoutError:
                exchange.status = 200
                return False
        else:
            head = await work
        exchange.status = head.status
        if head.status != 200:
            content = await connection.body()
            if exchange.status in REFUSED:
                exchange.retry_after = float(head.headers.get("retry-after", 1.0))
            else:
                exchange.error = content[:300].decode("utf-8", "replace")
            return True
        if request.streamed:
            return await self._stream(connection, request, exchange)
        answer = json.loads(await connection.body())
        (choice,) = answer["choices"]
        exchange.text = (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
        _read(answer, exchange)
        return True

    async def _stream(self, connection: Connection, request: PlannedRequest, exchange: LoadExchange) -> bool:
        async for line in connection.lines():
            if not line.startswith(b"data: "):
                continue
            content = line[len(b"data: ") :].decode()
            if content == "[DONE]":
                continue
            if _read_event(json.loads(content), exchange):
                exchange.text_times.append(self._clock())
                if request.behaviour == "slow":
                    await asyncio.sleep(self._workload.pause)
            if request.leaves and len(exchange.text_times) >= request.events:
                return False
        return True


def _body(target: Target, prompt: Prompt, request: PlannedRequest, workload: Workload) -> tuple[str, bytes]:
    """The path and the body of a request: greedy decoding of messages, a text or token ids."""
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": workload.max_tokens,
        "temperature": 0,
        "stream": request.streamed,
        "return_token_ids": True,
        "disable_spec_decode": not workload.drafts,
        **target.fields,
    }
    if request.streamed:
        body["stream_options"] = {"include_usage": True}
    is_chat = isinstance(prompt, Sequence) and not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
    body["messages" if is_chat else "prompt"] = prompt
    return "/v1/chat/completions" if is_chat else "/v1/completions", json.dumps(body).encode()


def _read_event(event: Mapping[str, Any], exchange: LoadExchange) -> bool:
    """Add an event to the exchange; returns whether it has text."""
    if (error := event.get("error")) is not None:
        if isinstance(error, Mapping) and error.get("code") == "queue_full":  # it waited, until others needed its place
            exchange.status, exchange.retry_after = 503, 1.0
            return False
        exchange.error = str(error.get("message") if isinstance(error, Mapping) else error)
        return False
    text = ""
    for choice in event.get("choices") or ():
        delta = choice.get("delta")
        text += (choice.get("text") if delta is None else delta.get("content")) or ""
    exchange.text += text
    _read(event, exchange)
    return bool(text)


def _read(answer: Mapping[str, Any], exchange: LoadExchange) -> None:
    """Add what an event or a whole answer has beside its text."""
    for choice in answer.get("choices") or ():
        exchange.ending = choice.get("finish_reason") or exchange.ending
        if (ids := choice.get("token_ids")) is not None:
            exchange.token_ids = [*(exchange.token_ids or ()), *ids]
    if (usage := answer.get("usage")) is not None:
        exchange.tokens = usage["completion_tokens"]
    if (metrics := answer.get("metrics")) is not None:
        exchange.drafts = metrics.get("speculative_decoding")
