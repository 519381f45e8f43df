"""HTTP load: clients of an OpenAI-compatible service that read at their own speed and may leave at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.workload import REFUSED, Clock, LoadExchange, PlannedRequest, Send, Workload

_SMALL = 4096  # bytes that the system and the reader buffer for a slow client
_LIMIT = 1 << 20  # bytes of one line
_TIMEOUT = 300.0  # seconds for one answer
_DONE = "[DONE]"


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


def address_of(url: str) -> Address:
    """The address in a URL; a path that ends in /v1 is that of the API."""
    parts = urlsplit(url)
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port or parts.query:
        raise OptionFault(f"{url!r} is no address of a service: expected http://HOST:PORT")
    return Address(parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))


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

    @property
    def headers(self) -> dict[str, str]:
        """Headers of all requests."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


@asynccontextmanager
async def http_sender(
    target: Target, workload: Workload, prompts: Sequence[Prompt], clock: Clock
) -> AsyncGenerator[Send, None]:
    """A function that sends requests to a service and records what comes back."""
    load = _HttpLoad(target, workload, prompts, clock)
    try:
        yield load.send
    finally:
        await load.close()


class _HttpLoad:
    """The connections of a run: one per client, reused while the service allows it."""

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
        path, body = load_request_body(self._target.model, self._prompts[request.prompt], request, self._workload)
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
            await _refusal(connection, exchange, head.headers)
            return True
        if request.streamed:
            return await self._stream(connection, request, exchange)
        read_answer(json.loads(await connection.body()), exchange)
        return True

    async def _stream(self, connection: Connection, request: PlannedRequest, exchange: LoadExchange) -> bool:
        async for line in connection.lines():
            if not line.startswith(b"data: "):
                continue
            content = line[len(b"data: ") :].decode()
            if content == _DONE:
                continue
            if read_event(json.loads(content), exchange):
                exchange.text_times.append(self._clock())
                if request.behaviour == "slow":
                    await asyncio.sleep(self._workload.pause)
            if request.leaves and len(exchange.text_times) >= request.events:
                return False
        return True


def load_request_body(model: str, prompt: Prompt, request: PlannedRequest, workload: Workload) -> tuple[str, bytes]:
    """The path and the body of a request: greedy decoding of messages, a text or token ids."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": workload.max_tokens,
        "temperature": 0,
        "stream": request.streamed,
        "return_token_ids": True,
        "disable_spec_decode": not workload.drafts,
    }
    if request.streamed:
        body["stream_options"] = {"include_usage": True}
    is_chat = isinstance(prompt, Sequence) and not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
    body["messages" if is_chat else "prompt"] = prompt
    return "/v1/chat/completions" if is_chat else "/v1/completions", json.dumps(body).encode()


def read_event(event: Mapping[str, Any], exchange: LoadExchange) -> bool:
    """Add an event to the exchange; returns whether it has text."""
    if (error := event.get("error")) is not None:
        exchange.error = str(error.get("message") if isinstance(error, Mapping) else error)
        return False
    _read_report(event, exchange)
    text = ""
    for choice in event.get("choices") or ():
        delta = choice.get("delta")
        text += (choice.get("text") if delta is None else delta.get("content")) or ""
        _read_choice(choice, exchange)
    exchange.text += text
    return bool(text)


def read_answer(answer: Mapping[str, Any], exchange: LoadExchange) -> None:
    """Add a whole answer to the exchange."""
    (choice,) = answer["choices"]
    exchange.text = (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
    _read_choice(choice, exchange)
    _read_report(answer, exchange)


def _read_choice(choice: Mapping[str, Any], exchange: LoadExchange) -> None:
    exchange.ending = choice.get("finish_reason") or exchange.ending
    if (ids := choice.get("token_ids")) is not None:
        exchange.token_ids = [*(exchange.token_ids or ()), *ids]


def _read_report(found: Mapping[str, Any], exchange: LoadExchange) -> None:
    if (usage := found.get("usage")) is not None:
        exchange.tokens = usage["completion_tokens"]
    if (metrics := found.get("metrics")) is not None:
        exchange.drafts = metrics.get("speculative_decoding")


async def _refusal(connection: Connection, exchange: LoadExchange, headers: Mapping[str, str]) -> None:
    content = await connection.body()
    if exchange.status in REFUSED:
        exchange.retry_after = float(headers.get("retry-after", 1.0))
    else:
        exchange.error = content[:300].decode("utf-8", "replace")


async def get_json(target: Target, path: str) -> tuple[int, Any]:
    """Status and JSON of an endpoint; the JSON is None if the body is not."""
    connection = await Connection.open(target.address)
    try:
        head = await connection.request("GET", path, headers=target.headers)
        try:
            return head.status, json.loads(await connection.body())
        except ValueError:
            return head.status, None
    finally:
        await connection.close()


async def first_model(address: Address, key: str) -> str:
    """The name of the first model of a service."""
    status, found = await get_json(Target(address, "", key), "/v1/models")
    if status != 200 or not isinstance(found, dict) or not found.get("data"):
        raise BadResponse(f"GET {address.url}/v1/models answered {status}: expected a list of models")
    return str(found["data"][0]["id"])
