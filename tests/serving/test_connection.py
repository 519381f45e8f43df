"""Connections: what a stranger sends costs a bounded amount of memory, time and descriptors."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from spaceport.serving.options import ServiceOptions
from support.chat_runtime import RunningService, chat_runtime, running_service, wait_until

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"
OPTIONS = ServiceOptions(head_timeout=0.3, body_timeout=0.3, send_timeout=0.3, most_connections=6)


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with running_service({"demo": chat_runtime}, OPTIONS) as running:
        yield running


@contextmanager
def connected(service: RunningService, sent: bytes = b"") -> Iterator[socket.socket]:
    """A connection to the service, over which something was sent."""
    url = urlsplit(service.url)
    with socket.create_connection((url.hostname, url.port), timeout=60) as client:
        client.sendall(sent)
        yield client


def received(client: socket.socket) -> bytes:
    """All that comes until the service closes the connection."""
    parts = []
    while part := client.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def answer(service: RunningService, sent: bytes, later: bytes = b"") -> tuple[int, dict[str, Any]]:
    """The status and body of a response after which the connection is closed."""
    with connected(service, sent) as client:
        time.sleep(0.05 if later else 0)
        client.sendall(later)
        head, _, body = received(client).partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)


def wait_until_closed(service: RunningService) -> None:
    """Wait until the service has no connection of an earlier test."""
    wait_until(lambda: not service.server.server_state.connections)


def wait_until_read(service: RunningService, requests: int) -> None:
    """Wait until the service has read the heads of this many requests, and has no other connection."""
    wait_until(lambda: len(service.server.server_state.connections) == requests and not any(service.service.silent))


HEAD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
MANY, ENDLESS = b"a: b\r\n" * 20_000, b"a: " + b"b" * 100_000


@pytest.mark.parametrize(
    ("sent", "later"),
    [
        *((HEAD + MANY, b""), (HEAD + ENDLESS, b""), (HEAD + b"x" * 100_000, b"")),
        (HEAD + b"a: " + b"b" * 65_520 + b"\r\nc: d\r\n\r\n", b""),
        *((CHUNKED, b"0\r\n" + MANY), (CHUNKED, b"0\r\n" + ENDLESS)),
    ],
    ids=["many", "endless value", "endless name", "one too many", "many trailers", "endless trailer"],
)
def test_headers_and_trailers_of_more_than_64_kib_are_refused(
    service: RunningService, sent: bytes, later: bytes
) -> None:
    status, body = answer(service, sent, later)
    assert status == 431
    assert body["error"]["message"] == "the headers have more than 65536 bytes: send fewer or shorter ones"


def test_headers_of_less_than_64_kib_and_a_body_in_one_piece_are_read(service: RunningService) -> None:
    content = json.dumps({"prompt": "import json\n" * 30_000, "max_tokens": 1}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\na: %b\r\ncontent-length: %d\r\n\r\n"
    )
    status, body = answer(service, head % (b"b" * 65_000, len(content)) + content)
    assert status == 400
    assert "prompt" in body["error"]["message"]


@pytest.fixture(scope="module")
def patient() -> Iterator[RunningService]:
    with running_service({"demo": chat_runtime}, ServiceOptions(most_bytes=100_000, most_connections=6)) as running:
        yield running


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (POST.replace(b"100", b"9000000"), 413),
        (POST.replace(b"content-length: 100", b"transfer-encoding: chunked") + b"0\r\n", 431),
        (GET[:-2], 431),
        (b"no request\r\n", 400),
        (POST + b"x" * 100 + b"no request\r\n", 400),
    ],
)
def test_a_client_that_sends_more_than_is_read_gets_its_answer(
    patient: RunningService, sent: bytes, status: int
) -> None:
    with connected(patient, sent) as client:
        for _ in range(10):
            client.sendall(b"a" * 50_000)
            time.sleep(0.002)
        head, _, body = received(client).partition(b"\r\n\r\n")
    assert (int(head.split()[1]), len(body)) == (status, int(head.lower().partition(b"length: ")[2].split()[0]))
    assert b"\r\nconnection: close" in head.lower()


@pytest.mark.parametrize(("size", "pause"), [(1 << 20, 0), (1, 0.02)])
def test_an_answered_client_that_never_stops_sending_loses_its_connection(
    service: RunningService, patient: RunningService, size: int, pause: float
) -> None:
    begun, sent = time.monotonic(), 0
    with connected(service if pause else patient, b"no request\r\n") as client, suppress(ConnectionError):
        while sent < 64 << 20 and time.monotonic() - begun < 60:
            client.sendall(b"a" * size)
            sent += size
            time.sleep(pause)
    assert sent < 64 << 20
    assert time.monotonic() - begun < 60


def test_answered_connections_that_stay_take_no_place_of_others_and_are_bounded(patient: RunningService) -> None:
    with ExitStack() as held:
        for _ in range(70):
            client = held.enter_context(connected(patient, b"no request\r\n"))
            assert received(client).startswith(b"HTTP/1.1 400")
        with connected(patient, GET) as client:
            assert client.recv(12) == b"HTTP/1.1 200"
        assert len(patient.service.lingering) <= 64


@pytest.mark.parametrize("sent", [b"", b"\r\n", GET[:-2], GET + GET[:-2], POST])
def test_a_request_that_does_not_arrive_in_time_ends_its_connection(service: RunningService, sent: bytes) -> None:
    begun = time.monotonic()
    with connected(service, sent) as client:
        content = received(client)
    assert time.monotonic() - begun > 0.2
    assert (b"HTTP/1.1 408 Request Timeout\r\n" in content) == (len(sent) > 2)
    if sent == POST:
        assert json.loads(content.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("the body did not come")


def test_requests_in_time_share_a_connection() -> None:
    with (
        running_service({"demo": chat_runtime}, ServiceOptions(head_timeout=1.5)) as service,
        connected(service) as client,
    ):
        for _ in range(4):
            time.sleep(0.4)
            client.sendall(GET)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_loses_its_connection(service: RunningService) -> None:
    with connected(service, GET) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert client.recv(12) == b"HTTP/1.1 200"
        ended = time.monotonic() + 60
        with suppress(ConnectionError):  # the client does not always learn of it
            while service.server.server_state.connections:
                assert time.monotonic() < ended
                client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n")
                time.sleep(0.0005)


def test_requests_beyond_those_that_may_wait_end_their_connection(service: RunningService) -> None:
    with connected(service, GET * 50) as client:
        content = b""
        while content.count(b"HTTP/1.1 200") < 50:
            content += client.recv(1 << 16)
    with connected(service, GET * 500) as client:
        assert received(client).count(b"HTTP/1.1 200") < 5


def assert_waits(client: socket.socket) -> None:
    """Assert that the service still waits for the body of a client's request."""
    client.sendall(b"x" * 100)
    assert client.recv(12) == b"HTTP/1.1 400"


def test_beyond_the_limit_the_longest_silent_connection_makes_room_and_those_with_a_request_stay(
    patient: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    wait_until_closed(patient)
    most = OPTIONS.most_connections
    with ExitStack() as held, caplog.at_level("INFO"):

        def connect(sent: bytes = b"") -> socket.socket:
            return held.enter_context(connected(patient, sent))

        idle = connect(GET)
        assert idle.recv(1 << 16).startswith(b"HTTP/1.1 200")
        asking = [connect(POST) for _ in range(most - 3)]
        silent = [connect(), connect(GET[:-2])]
        wait_until(lambda: [len(group) for group in patient.service.silent] == [len(silent), 1])
        for _ in range(3):  # of which each is silent too, and makes room for the next one
            silent.append(connect())
            assert received(silent.pop(0)) == b""
        for _ in range(2):
            assert connect(GET).recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert [received(client) for client in silent] == [b"", b""]
        assert connect(GET).recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert received(idle) == b""
        for client in asking:
            assert_waits(client)
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert warnings == [f"connections are closed: {most} are open"]


def test_more_connections_with_requests_than_the_limit_are_refused(patient: RunningService) -> None:
    wait_until_closed(patient)
    with ExitStack() as held:
        asking = [held.enter_context(connected(patient, POST)) for _ in range(OPTIONS.most_connections)]
        wait_until_read(patient, len(asking))
        for _ in range(3):
            status, body = answer(patient, b"a" * 200_000, b"a" * 200_000)
            assert (status, body["error"]["code"]) == (503, "too_many_connections")
        for client in asking:
            assert_waits(client)
    text = patient.service.metrics.text()
    assert b'admission_rejections_total{reason="too_many_connections"}' in text


def test_a_client_that_leaves_within_its_body_has_one_short_entry(
    patient: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    def has_left(entry: logging.LogRecord) -> bool:
        return bool(entry.__dict__.get("fields", {}).get("status") != 400)  # of an earlier test

    with caplog.at_level("INFO"):
        wait_until_closed(patient)
        with connected(patient, POST):
            wait_until_read(patient, 1)
        wait_until_closed(patient)
        wait_until(lambda: any(map(has_left, caplog.records)))
    (entry,) = filter(has_left, caplog.records)
    assert (entry.levelname, entry.exc_info, entry.getMessage()) == ("INFO", None, "request ended")
    assert entry.__dict__["fields"]["status"] == 499


UPGRADE = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (b"\x16\x03\x01\x02\x00\x01\r\n", b"400", "a connection ends: the request is not valid HTTP/1.1"),
        (UPGRADE, b"200", "a request for another protocol than HTTP/1.1 is answered as any other"),
    ],
)
def test_another_protocol_is_refused_or_answered_as_any_request_with_one_short_entry(
    service: RunningService, caplog: pytest.LogCaptureFixture, sent: bytes, status: bytes, message: str
) -> None:
    with caplog.at_level("INFO"), connected(service, sent) as client:
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 " + status)
    entries = [entry.getMessage() for entry in caplog.records if entry.name != "uvicorn.access"]
    assert [entry for entry in entries if entry != "request ended"] == [message]
