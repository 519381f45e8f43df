"""HTTP client: connections whose clients read at their own speed and may leave at any moment.

It costs little CPU time, which the measured services need, and can reset a connection, which other clients cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from spaceport.graphs.contract.faults import OptionFault

_SMALL = 4096  # bytes that the system and the reader buffer for a slow client
_LIMIT = 1 << 20  # bytes of one line


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
