"""The service of docs/examples/10_service over a fake engine, asked by real HTTP clients."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from runpy import run_path
from typing import Any

import pytest
import uvicorn

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from support.hash_engine import Language
from support.hash_runtime import hash_runtime
from support.paths import DOCS
from support.stepwise_engine import stepwise_runtime

ENDLESS = Language(3, end_every=10**9)


@contextmanager
def asking(port: int, asked: object) -> Iterator[HTTPResponse]:
    """The service's answer, of which only the head has been read."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    with closing(connection):
        connection.request("POST", "/write", json.dumps(asked))
        with connection.getresponse() as response:
            yield response


def reported(port: int, asked: object) -> tuple[int, str, str]:
    """What the service answers when it streams nothing."""
    with asking(port, asked) as response:
        return response.status, json.loads(response.read())["error"], response.headers.get("retry-after", "")


def written(port: int, asked: object) -> tuple[str, dict[str, Any]]:
    """The text of a stream, and what was said at its end."""
    with asking(port, asked) as response:
        assert response.status == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        *pieces, last = response.read().decode().removesuffix("\n\n").split("\n\n")
    assert last.startswith("event: end\ndata: ")
    text = "".join(json.loads(piece.removeprefix("data: "))["text"] for piece in pieces)
    return text, json.loads(last.split("data: ")[1])


@contextmanager
def serving(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of the service over a runtime."""
    monkeypatch.setenv("BUNDLE", "any")
    monkeypatch.setattr(Runtime, "open", lambda bundle, **options: runtime)
    names = run_path(str(DOCS / "examples" / "10_service" / "service.py"))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(names["app"], log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield int(listening.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(60)


INVALID: list[tuple[object, str]] = [
    ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0: expected at least 1"),
    ({"prompt": ""}, "the prompt is empty: expected at least one character"),
    ({"prompt": "a" * 300}, "shorten the prompt"),
    ({"prompt": [10**9]}, "expected ids from 0 to"),
    ({"prompt": None}, "the prompt is None: expected text"),
    ({}, "'prompt'"),
    ([], "list indices"),
]


def test_clients_at_once_get_the_runtimes_own_text_or_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[Any] = ["abc", "hij", [1, 2, 3]] * 3
    with hash_runtime(ENDLESS, requests=4) as runtime, serving(runtime, monkeypatch) as port:
        expected = [runtime.generate(prompt, Decoding(max_tokens=20)) for prompt in prompts]
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda prompt: written(port, {"prompt": prompt, "max_tokens": 20}), prompts)
            ends = [{"ending": one.ending, "tokens": len(one.tokens)} for one in expected]
            assert list(found) == [(one.text, end) for one, end in zip(expected, ends, strict=True)]
        for asked, message in INVALID:
            status, said, _ = reported(port, asked)
            assert status == 400
            assert message in said


def test_a_client_that_disconnects_frees_its_kv_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, engine = stepwise_runtime(ENDLESS)
    with serving(runtime, monkeypatch) as port, ThreadPoolExecutor(2) as pool:
        engine.leave.release(3)
        with asking(port, {"prompt": [1, 2, 3], "max_tokens": 60}) as answer:
            assert answer.readline().startswith(b"data: ")
        second = pool.submit(written, port, {"prompt": [4], "max_tokens": 2})
        steps = 0
        while not second.done():
            engine.leave.release()
            steps += 1
            time.sleep(0.1)
        assert steps < 40  # the first text would have taken more than that
        assert len(second.result()[0]) == 2


def test_who_comes_when_all_is_full_is_asked_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, engine = stepwise_runtime(ENDLESS, queue_limit=0)
    with serving(runtime, monkeypatch) as port, ThreadPoolExecutor(1) as pool:
        first = pool.submit(written, port, {"prompt": [1, 2, 3], "max_tokens": 3})
        engine.wait()
        status, said, retry = reported(port, {"prompt": [4]})
        assert (status, retry) == (503, "1")
        assert "try again later" in said
        engine.go()
        assert len(first.result(60)[0]) == 3
