"""The service of docs/examples/10_service over a fake engine: what its page shows of clients that leave or come too many."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from runpy import run_path

import pytest
import uvicorn

from spaceport.runtime.session import Runtime
from support.hash_engine import Language
from support.paths import DOCS
from support.stepwise_engine import stepwise_runtime


def ask(port: int, prompt: list[int], max_tokens: int) -> tuple[HTTPConnection, HTTPResponse]:
    """The service's answer, of which only the head has been read."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/write", json.dumps({"prompt": prompt, "max_tokens": max_tokens}))
    return connection, connection.getresponse()


def test_who_comes_when_all_is_full_may_come_back_and_who_leaves_frees_its_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, engine = stepwise_runtime(Language(3, end_every=10**9), queue_limit=0)
    monkeypatch.setenv("BUNDLE", "any")
    monkeypatch.setattr(Runtime, "open", lambda bundle, **options: runtime)
    app = run_path(str(DOCS / "examples" / "10_service" / "service.py"))["app"]
    with socket.socket() as listening, ThreadPoolExecutor(1) as pool:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        first = pool.submit(ask, port, [1, 2, 3], 60)
        engine.wait()
        refused, answer = ask(port, [4], 2)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "try again later" in json.loads(answer.read())["error"]
        engine.leave.release(3)
        left, answer = first.result(60)
        assert answer.readline().startswith(b"data: ")
        for connection in (refused, answer, left):
            connection.close()
        steps = 0
        while True:
            engine.leave.release()
            steps += 1
            time.sleep(0.1)
            again, answer = ask(port, [4], 2)
            if answer.status == 200:
                break
        assert steps < 40  # the first text would have taken more than that
        engine.go()
        assert b"event: end" in answer.read()
        again.close()
        server.should_exit = True
        thread.join(60)
