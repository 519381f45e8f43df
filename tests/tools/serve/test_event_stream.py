"""Event stream: pings, errors, clients that leave and clients that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.serve.event_stream import DONE, EventStream, event


class Client:
    """A client of an application: records what it is sent, and leaves when asked."""

    def __init__(self, reads: bool = True) -> None:
        self.sent: list[bytes] = []
        self.ended = False
        self.left = asyncio.Event()
        self._reads = reads

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            if not self._reads:
                await asyncio.Event().wait()
            self.sent.append(message["body"])
            self.ended = not message["more_body"]


class Events:
    """Events that come when they are released, and whether they were closed."""

    def __init__(self, *contents: bytes | Exception | None) -> None:
        self.closed = False  # by the end of the generator
        self.ended = False
        self._contents = contents

    def close(self) -> None:
        self.ended = True

    async def generate(self) -> AsyncGenerator[bytes, None]:
        try:
            for content in self._contents:
                if content is None:
                    await asyncio.Event().wait()
                elif isinstance(content, Exception):
                    raise content
                else:
                    yield content
        finally:
            self.closed = True


async def run(events: Events, client: Client, leave_after: float | None = None) -> None:
    stream = EventStream(events.generate(), events.close, ping=0.05, send_timeout=0.1)
    if leave_after is not None:
        asyncio.get_running_loop().call_later(leave_after, client.left.set)
    await asyncio.wait_for(stream({}, client.receive, client.send), 10)  # type: ignore[arg-type]


def test_events_are_sent_in_order_and_the_response_ends() -> None:
    async def check() -> None:
        events, client = Events(b"1", b"2"), Client()
        await run(events, client)
        assert (client.sent, client.ended, events.closed) == ([b"1", b"2", b""], True, True)

    asyncio.run(check())


def test_a_silent_stream_sends_comments_until_its_client_leaves() -> None:
    async def check() -> None:
        events, client = Events(b"1", None), Client()
        await run(events, client, leave_after=0.3)
        assert client.sent[0] == b"1"
        assert set(client.sent[1:]) == {b": ping\n\n"}
        assert len(client.sent) > 2
        assert (client.ended, events.closed) == (False, True)

    asyncio.run(check())


def test_an_error_is_the_last_event() -> None:
    async def check() -> None:
        events, client = Events(b"1", OptionFault("no token can follow")), Client()
        await run(events, client)
        expected = {
            "error": {"message": "no token can follow", "type": "invalid_request_error", "param": None, "code": None}
        }
        assert client.sent == [b"1", event(expected), DONE, b""]
        assert events.closed

    asyncio.run(check())


def test_a_client_that_does_not_read_loses_its_stream() -> None:
    async def check() -> None:
        events, client = Events(b"1", b"2"), Client(reads=False)
        await run(events, client)
        assert (client.sent, events.closed) == ([], True)

    asyncio.run(check())


def test_a_client_that_left_before_the_first_event_ends_the_request() -> None:
    class Broken(Client):
        async def send(self, message: Any) -> None:
            raise OSError("the connection is closed")

    async def check() -> None:
        events = Events(b"1")
        await run(events, Broken())
        assert (events.closed, events.ended) == (False, True)

    asyncio.run(check())


def test_events_take_no_task_of_their_own() -> None:
    def tasks_for(count: int) -> int:
        created: list[Any] = []

        def create(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
            created.append(work)
            return asyncio.Task(work, loop=loop, **options)

        async def check() -> None:
            asyncio.get_running_loop().set_task_factory(create)
            events, client = Events(*[b"1"] * count), Client()
            await run(events, client)
            assert len(client.sent) == count + 1

        asyncio.run(check())
        return len(created)

    assert tasks_for(2) == tasks_for(200)


def test_a_client_that_stops_reading_loses_its_stream() -> None:
    class Slow(Client):
        async def send(self, message: Any) -> None:
            self._reads = len(self.sent) < 3
            await super().send(message)

    async def check() -> None:
        events, client = Events(b"1", b"2", b"3", b"4", b"5"), Slow()
        await run(events, client)
        assert (client.sent, client.ended, events.closed, events.ended) == ([b"1", b"2", b"3"], False, True, True)

    asyncio.run(check())
