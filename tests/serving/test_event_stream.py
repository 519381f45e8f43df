"""Event stream: pings, errors, clients that leave or do not read; pieces of several choices, of which none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.serving.event_stream import DONE, EventStream, event


class Client:
    """A client of an application: records what it is sent, stops reading after some parts, and leaves after some."""

    def __init__(self, reads: float = float("inf"), leaves: float = float("inf"), broken: bool = False) -> None:
        self.sent: list[bytes] = []
        self.ended = False
        self._left = asyncio.Event()
        self._reads, self._leaves, self._broken = reads, leaves, broken

    async def receive(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self._broken:
            raise OSError("the connection is closed")
        if message["type"] == "http.response.body":
            if len(self.sent) >= self._reads:
                await asyncio.Event().wait()
            self.sent.append(message["body"])
            if len(self.sent) >= self._leaves:
                self._left.set()
            self.ended = not message["more_body"]


def exchange(*contents: bytes | Exception | None, **client: Any) -> tuple[Client, set[str]]:
    """A client after a stream of these events, of which one may be an error or never come (None), and what was closed."""
    closed: set[str] = set()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            for content in contents:
                if content is None:
                    await asyncio.Event().wait()
                elif isinstance(content, Exception):
                    raise content
                else:
                    yield content
        finally:
            closed.add("events")

    async def run() -> tuple[Client, set[str]]:
        reader = Client(**client)
        stream = EventStream(events(), lambda: closed.add("request"), ping=0.05, send_timeout=0.1)
        await asyncio.wait_for(stream({}, reader.receive, reader.send), 60)  # type: ignore[arg-type]
        return reader, {*closed}  # before the event loop closes what is left

    return asyncio.run(run())


def test_a_silent_stream_sends_comments_until_its_client_leaves() -> None:
    client, closed = exchange(b"1", None, leaves=4)
    assert client.sent == [b"1", *[b": ping\n\n"] * 3]
    assert (client.ended, closed) == (False, {"events", "request"})


def test_an_error_is_the_last_event() -> None:
    client, closed = exchange(b"1", OptionFault("no token can follow"))
    error = {"message": "no token can follow", "type": "invalid_request_error", "param": None, "code": None}
    assert client.sent == [b"1", event({"error": error}), DONE, b""]
    assert closed == {"events", "request"}


@pytest.mark.parametrize("reads", [0, 3])
def test_a_client_that_stops_reading_loses_its_stream(reads: int) -> None:
    client, closed = exchange(b"1", b"2", b"3", b"4", b"5", reads=reads)
    assert (client.sent, client.ended) == ([b"1", b"2", b"3"][:reads], False)
    assert closed == {"events", "request"}


def test_a_client_that_left_before_the_first_event_ends_the_request() -> None:
    _, closed = exchange(b"1", broken=True)
    assert closed == {"request"}
