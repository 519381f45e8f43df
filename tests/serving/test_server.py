"""Server: the command, its keys and names, and how it stops while requests run."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE
from spaceport.runtime.session import Runtime
from spaceport.serving import server
from spaceport.serving.options import ServiceOptions
from spaceport.serving.server import listening
from spaceport.tools.cli import INPUT, USAGE, run
from spaceport.tools.cli.configuration import keys_of
from spaceport.tools.cli.serve import models_of
from support.chat_runtime import NO_DRAFTS, RunningService, chat_runtime, running_service, wait_until

_COMMAND = [sys.executable, "-c", "import sys; from spaceport.tools.cli import run; sys.exit(run(sys.argv[1:]))"]


@contextmanager
def served(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A running service: its address and its process."""
    command = [*_COMMAND, "serve", *arguments, "--port", "0", "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "SPACEPORT_API_KEY": ""})
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"running on (http://\S+)", line):
                wait_until_ready(found[1])
                yield found[1], process
                return
        pytest.fail("the service did not start")
    finally:
        process.kill()
        process.communicate()


def wait_until_ready(address: str) -> None:
    while True:
        with suppress(urllib.error.HTTPError):  # 503 while bundles are opened
            urllib.request.urlopen(f"{address}/health", timeout=60).close()
            return
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("drain", ["60", "0.1"])
def test_a_request_that_runs_may_end_within_a_time_before_the_service_stops(demo_bundle: Path, drain: str) -> None:
    with served(f"code={demo_bundle}", "--drain-timeout", drain) as (address, process):
        given = {"model": "code", "prompt": "import json\n", "max_tokens": 450, "temperature": 0, "stream": True}
        more = {"ignore_eos": True, "spaceport": NO_DRAFTS, "n": 1 if drain == "60" else 8}
        request = urllib.request.Request(f"{address}/v1/completions", json.dumps({**given, **more}).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            first = response.readline()
            process.send_signal(signal.SIGTERM)
            rest = response.read().decode()
        assert first.startswith(b"data: {")
        if drain == "60":
            assert rest.endswith("data: [DONE]\n\n")
            assert '"error"' not in rest
            assert '"finish_reason":"length"' in rest
        else:
            assert failure_of(rest) == "stopping"
        assert process.wait(60) == 0


def streamed(service: RunningService, path: str, ask: dict[str, Any], started: Semaphore | None = None) -> str:
    """The events of a streamed answer."""
    request = urllib.request.Request(f"{service.url}/{path}", json.dumps({**ask, "stream": True}).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        if started is not None:
            started.release()
        text: str = response.read().decode()
    return text


def failure_of(text: str) -> str:
    """The code of the error with which a stream ends."""
    *_, failure, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    code: str = json.loads(failure.removeprefix("data: "))["error"]["code"]
    return code


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_a_second_signal_ends_each_stream_with_an_error(path: str) -> None:
    prompt = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    ask = {"input": "a"} if path == "responses" else {**prompt, "ignore_eos": True, "max_tokens": 900}

    started = Semaphore(0)
    with running_service({"demo": partial(chat_runtime, delay=0.1)}) as running, ThreadPoolExecutor(16) as clients:
        streams = clients.map(lambda _: streamed(running, path, ask, started), range(16))
        for _ in range(16):
            started.acquire()
        for _ in range(2):
            running.server.handle_exit(signal.SIGTERM, None)
        assert [failure_of(text) for text in streams] == ["stopping"] * 16


def test_an_engine_call_that_does_not_return_ends_each_stream_with_an_error() -> None:
    asked = [("completions", {"prompt": "a", "n": 2}), ("responses", {"input": "a"})] * 2
    hung = partial(chat_runtime, delay=2.0, call_timeout=0.5)
    with running_service({"demo": hung}) as running, ThreadPoolExecutor(4) as clients:
        texts = clients.map(lambda one: streamed(running, *one), asked)
        assert [failure_of(text) for text in texts] == ["engine_fault"] * 4


def test_models_are_named_by_their_folders_or_as_asked(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    cached = "x/qwen2.5-0123456789abcdef"
    for name, given in (("one", "x/one.bundle"), ("qwen2.5", "qwen2.5.gguf"), ("llama-3.2", "llama-3.2")):
        assert models_of([given, "b=x/two"]) == {name: Path(given), "b": Path("x/two")}
    assert models_of([str(folder), cached]) == {"a=b": folder, "qwen2.5": Path(cached)}
    for wrong, message in (
        (["x/one", "y/one"], "two bundles have the name one"),
        (["one="], "expected BUNDLE or NAME=BUNDLE"),
    ):
        with pytest.raises(OptionFault, match=message):
            models_of(wrong)


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the chat\nsk-1\n\n sk-2 \n", "utf-8")
    assert keys_of(file, "other") == ("sk-1", "sk-2")
    assert keys_of(None, "a, b,") == ("a", "b")
    assert keys_of(None, "") == ()
    file.write_text("\n", "utf-8")
    with pytest.raises(OptionFault, match="has no key: expected one per line"):
        keys_of(file, "")
    with pytest.raises(OptionFault, match="cannot be read"):
        keys_of(tmp_path / "none", "")


def test_invalid_options_are_refused() -> None:
    wrong: dict[str, Any] = {"keys": ("",), "metrics_prefix": "a-b", "most_choices": 0, "drain_timeout": 0.0}
    for name, value in {**wrong, "audit_rate": 1.5, "audit_action": "stop"}.items():
        with pytest.raises(OptionFault, match="a key of the service is empty" if name == "keys" else f"{name} is "):
            ServiceOptions(**{name: value})


def test_the_address_is_announced_when_all_bundles_are_open(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    may_open = Event()

    def opener() -> Runtime:
        assert may_open.wait(60)
        return chat_runtime()

    def announced() -> bool:
        return "running on http://127.0.0.1:" in caplog.text

    with running_service({"slow": opener}, answers_while_opening=True) as running:
        address = running.url.removesuffix("/v1")
        for path in ("health", "v1/models", "v1/models/slow", "tokenizer_info"):
            with pytest.raises(urllib.error.HTTPError, match="503") as caught:
                urllib.request.urlopen(f"{address}/{path}", timeout=60)
            assert caught.value.headers["retry-after"] == (None if path == "health" else "1")
        time.sleep(0.3)  # three ticks
        assert not announced()
        may_open.set()
        wait_until_ready(address)
        wait_until(announced)
        grammars = running.service.models["slow"].runtime._admission.grammars
        wait_until(lambda: bool(grammars._vocabulary))
        time.sleep(0.2)  # two ticks
        assert caplog.text.count("running on http://127.0.0.1:") == 1


def test_serve_checks_folders_and_ports_before_it_opens_anything(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["serve", str(tmp_path / "nosuch")]) == INPUT
    assert "nosuch" in capfd.readouterr().err
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / MANIFEST_FILE).write_text("{", "utf-8")
    assert run(["serve", "--port", "0", str(broken)]) == INPUT
    said = capfd.readouterr().err
    assert str(broken / MANIFEST_FILE) in said
    assert "opening" not in said + capfd.readouterr().out
    with listening("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert run(["serve", str(broken), "--port", str(port)]) == USAGE
        assert f"port {port}: Address already in use: expected a free port" in capfd.readouterr().err


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="of glibc")
def test_a_service_returns_freed_memory_whatever_stays_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    monkeypatch.setattr(server, "_TRIM", 0.1)
    with running_service({"demo": chat_runtime}):
        blocks = [bytearray(b"x") * 60_000 for _ in range(1000)]
        before = resident()
        del blocks[::2]
        wait_until(lambda: resident() <= before - 20_000_000)
