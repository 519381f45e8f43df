"""Proxy: each request gets an answer or an error that the client understands, although the proxy below ends as it likes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Message, Receive, Scope, Send

from spaceport.tools.replicas.proxy import ResendRequests

Try = Callable[[Receive, Send], Awaitable[None]]
SCOPE: Scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
JSON = (b"content-type", b"application/json")
TEXT = (b"content-type", b"text/plain; charset=utf-8")


async def body_of(receive: Receive) -> bytes:
    """The whole body of a request."""
    found, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        found, more = found + message.get("body", b""), message.get("more_body", False)
    return found


def response(status: int, header: tuple[bytes, bytes], *parts: bytes, cut: bool = False) -> list[Message]:
    """The messages of a response in parts, the last of which is missing if it is cut."""
    start: Message = {"type": "http.response.start", "status": status, "headers": [header]}
    bodies = [{"type": "http.response.body", "body": part, "more_body": True} for part in parts]
    return [start, *bodies, *([] if cut else [{"type": "http.response.body", "body": b"", "more_body": False}])]


def exchange(tries: list[list[Message]], *body: bytes, leaves: bool = False) -> tuple[list[Message], list[bytes]]:
    """What the client gets, and the bodies that the proxy below got, of which each try ends with these messages."""
    parts: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in body[:-1]]
    parts.append({"type": "http.request", "body": body[-1] if body else b"", "more_body": False})
    got: list[bytes] = []
    sent: list[Message] = []

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        got.append(await body_of(receive))
        if leaves:
            assert (await receive())["type"] == "http.disconnect"
        for message in tries[len(got) - 1]:
            await send(message)

    async def receive() -> Message:
        return parts.pop(0) if parts else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(ResendRequests(proxy)(SCOPE, receive, send))
    return sent, got


def text(sent: list[Message]) -> bytes:
    assert not sent[-1].get("more_body", False)
    return b"".join(message.get("body", b"") for message in sent[1:])


ANSWER = response(200, JSON, b'{"choices": []}')


@pytest.mark.parametrize(
    "passed",
    [
        ANSWER,
        response(200, EVENTS, b"data: 1\n\n", b"data: [DONE]\n\n"),
        response(503, JSON, b'{"error": {"code": "queue_full"}}'),
        response(200, JSON, b'{"choices"', cut=True),
    ],
)
def test_a_response_passes_as_it_is(passed: list[Message]) -> None:
    assert exchange([passed, ANSWER], b"ask") == (passed, [b"ask"])


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_request_whose_replica_died_is_sent_again_with_its_whole_body(deaths: int) -> None:
    sent, got = exchange([*[[]] * deaths, ANSWER], b"first, ", b"second, ", b"third")
    assert sent == ANSWER
    assert got == [b"first, second, third"] * (deaths + 1)


def test_a_request_that_ends_each_replica_is_refused_after_three() -> None:
    sent, got = exchange([[]] * 9, b"ask")
    assert len(got) == 3
    assert sent[0]["status"] == 503
    assert dict(sent[0]["headers"])[b"retry-after"] == b"1"
    assert json.loads(text(sent))["error"]["code"] == "replica_died"


def test_a_stream_that_is_cut_ends_with_an_error_event() -> None:
    sent, got = exchange([response(200, EVENTS, b"data: 1\n\n", b"data: 2\n\n", cut=True), ANSWER], b"ask")
    assert len(got) == 1
    first, second, failure, last, end = text(sent).split(b"\n\n")
    assert (first, second, last, end) == (b"data: 1", b"data: 2", b"data: [DONE]", b"")
    assert json.loads(failure.removeprefix(b"data: "))["error"]["code"] == "replica_died"


def test_nothing_is_sent_to_a_client_that_has_left() -> None:
    assert exchange([[], ANSWER], b"ask", leaves=True) == ([], [b"ask"])
    cut = response(200, EVENTS, b"data: 1\n\n", cut=True)
    assert exchange([cut], b"ask", leaves=True) == (cut, [b"ask"])


def test_a_body_beyond_the_limit_is_not_stored_to_be_sent_again() -> None:
    part = bytes(2 << 20)
    sent, got = exchange([[], ANSWER], part, part, b"one more")
    assert len(got) == 1
    assert sent[0]["status"] == 503
    sent, got = exchange([[], ANSWER], part, part)
    assert (sent, len(got)) == (ANSWER, 2)


@pytest.mark.parametrize(("status", "kind"), [(429, "overloaded_error"), (408, "invalid_request_error")])
def test_a_refusal_of_the_proxy_becomes_an_error_object_with_one_id(status: int, kind: str) -> None:
    start, body, _ = response(status, TEXT, b"Request dropped due to backpressure")
    start["headers"] += [(b"retry-after", b"7"), (b"x-request-id", b"a"), (b"X-Request-ID", b"a")]
    sent, _ = exchange([[start, body | {"more_body": False}]], b"ask")
    assert sent[0]["status"] == status
    headers = dict(sent[0]["headers"])
    assert (headers[b"retry-after"], headers[b"x-request-id"]) == (b"7", b"a")
    assert [name.lower() for name, _ in sent[0]["headers"]].count(b"x-request-id") == 1
    error = json.loads(text(sent))["error"]
    assert (error["message"], error["type"]) == ("Request dropped due to backpressure", kind)
