"""The service of docs/examples/10_service: run as docs/embedding.md says, and asked by real HTTP clients."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import uvicorn

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from support.hash_engine import Language
from support.paths import DOCS
from support.stepwise_engine import StepwiseEngine, stepwise_runtime

SERVICE = DOCS / "examples" / "10_service"
PROMPTS: list[Any] = [
    "import json\n",
    [{"role": "user", "content": "Explain the parameters of move( src, dst )"}],
    "class Reader:\n",
    [10, 20, 30],
]


@contextmanager
def asking(port: int, asked: object) -> Iterator[HTTPResponse]:
    """The service's answer, of which only the head has been read."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    with closing(connection):
        connection.request("POST", "/write", json.dumps(asked))
        with connection.getresponse() as response:
            yield response


def reported(port: int, asked: object) -> tuple[int, dict[str, Any], str]:
    """What the service answers when it streams nothing."""
    with asking(port, asked) as response:
        return response.status, json.loads(response.read()), response.headers.get("retry-after", "")


def written(port: int, asked: object) -> tuple[list[str], dict[str, Any]]:
    """The pieces of a text, and what was said at its end."""
    with asking(port, asked) as response:
        assert response.status == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        *pieces, last = response.read().decode().removesuffix("\n\n").split("\n\n")
    assert last.startswith("event: end\ndata: ")
    return [json.loads(piece.removeprefix("data: "))["text"] for piece in pieces], json.loads(last.split("data: ")[1])


@pytest.fixture(scope="module")
def port(demo_bundle: Path) -> Iterator[int]:
    """The port of a server that runs the service on the demo model, in a process of its own."""
    command = [sys.executable, "-m", "uvicorn", "service:app", "--port", "0"]
    surroundings = {**os.environ, "BUNDLE": str(demo_bundle)}
    with subprocess.Popen(command, cwd=SERVICE, env=surroundings, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = ""
        for line in server.stderr:
            said += line
            if found := re.search(r"running on http://127\.0\.0\.1:(\d+)", line):
                break
        else:
            pytest.fail(said)
        drain = threading.Thread(target=server.stderr.read)  # what it says later must not fill the pipe
        drain.start()
        yield int(found[1])
        server.terminate()
        drain.join()
    assert server.returncode in (0, -15)  # uvicorn ends by the signal that it received


def test_the_text_that_is_streamed_is_the_runtimes_own(port: int, demo_bundle: Path) -> None:
    with Runtime.open(demo_bundle, threads=1) as runtime:
        for prompt in PROMPTS:
            pieces, end = written(port, {"prompt": prompt, "max_tokens": 60})
            expected = runtime.generate(prompt, Decoding(max_tokens=60))
            assert "".join(pieces) == expected.text
            assert end == {"ending": expected.ending, "tokens": len(expected.tokens)}
            assert len(pieces) > 1


def test_four_clients_at_once_get_what_each_gets_alone(port: int) -> None:
    orders = [{"prompt": prompt, "max_tokens": 80} for prompt in PROMPTS]
    alone = [written(port, order) for order in orders]
    with ThreadPoolExecutor(4) as pool:
        for found, expected in zip(pool.map(partial(written, port), orders * 3), alone * 3, strict=True):
            assert ("".join(found[0]), found[1]) == ("".join(expected[0]), expected[1])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0: expected at least 1"),
        ({"prompt": ""}, "the prompt is empty: expected at least one character"),
        ({"prompt": "x" * 30000}, "shorten the prompt"),
        ({"prompt": "a", "stop": [""]}, "expected strings of at least one character"),
        ({"prompt": [10**9]}, "expected ids from 0 to"),
        ({"prompt": 5}, "the prompt is 5: expected text"),
        ({"prompt": None}, "the prompt is None: expected text"),
        ({}, "'prompt'"),
        ([], "list indices"),
    ],
)
def test_an_invalid_request_is_answered_with_its_error(port: int, asked: object, message: str) -> None:
    status, said, _ = reported(port, asked)
    assert status == 400
    assert message in said["error"]


@contextmanager
def serving(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The service over a given runtime, in this process."""
    monkeypatch.setenv("BUNDLE", "any")
    monkeypatch.setattr(Runtime, "open", lambda bundle, **options: runtime)
    names = run_path(str(SERVICE / "service.py"))
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


def test_a_client_that_disconnects_frees_its_kv_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, engine = stepwise_runtime(Language(3, end_every=10**9))
    with serving(runtime, monkeypatch) as port, ThreadPoolExecutor(2) as pool:
        engine.leave.release(3)
        with asking(port, {"prompt": [1, 2, 3], "max_tokens": 60}) as answer:
            assert answer.readline().startswith(b"data: ")
        second = pool.submit(written, port, {"prompt": [4], "max_tokens": 2})
        assert steps_until(engine, second.done) < 40  # the first text would have taken more than that
        assert len("".join(second.result()[0])) == 2


def steps_until(engine: StepwiseEngine, over: Callable[[], bool]) -> int:
    """Take steps, slowly, until something has happened."""
    steps = 0
    while not over():
        engine.leave.release()
        steps += 1
        time.sleep(0.1)
    return steps


def test_who_comes_when_all_is_full_is_asked_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, engine = stepwise_runtime(Language(3, end_every=10**9), queue_limit=0)
    with serving(runtime, monkeypatch) as port, ThreadPoolExecutor(1) as pool:
        first = pool.submit(written, port, {"prompt": [1, 2, 3], "max_tokens": 3})
        engine.wait()
        status, said, retry = reported(port, {"prompt": [4]})
        assert (status, retry) == (503, "1")
        assert "try again later" in said["error"]
        engine.go()
        assert len("".join(first.result(60)[0])) == 3
