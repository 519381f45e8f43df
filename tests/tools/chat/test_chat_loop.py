"""Chat loop: a conversation on a terminal and through pipes, with a real bundle and a real service."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import uvicorn

from spaceport.runtime.backends.on_onnxruntime import OnnxRuntimeEngine
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.chat.chat_loop import Chat
from spaceport.tools.chat.conversation import Conversation
from spaceport.tools.chat.service_model import ServiceFault
from spaceport.tools.cli import run
from spaceport.tools.serve.application import application
from spaceport.tools.serve.options import ServiceOptions
from spaceport.tools.terminal.lanes import Span
from support.paths import DEMO
from support.terminal import Typist, at_a_terminal

pytestmark = pytest.mark.slow

SLOW = """
import time
from spaceport.runtime.backends.on_onnxruntime import OnnxRuntimeEngine
run = OnnxRuntimeEngine.run
OnnxRuntimeEngine.run = lambda *given: (time.sleep(0.02), run(*given))[1]
"""
PROGRAM = "import sys; from spaceport.tools.cli import main; sys.argv = ['spaceport', 'chat', *sys.argv[1:]]; main()"
QUESTION = json.loads((DEMO / "prompts.json").read_text("utf-8"))["triangular"]["user"].replace("\n", " ")
OPTIONS = ("--max-tokens", "24", "--temperature", "0")
KEY = "sk-right"
DRAFTED = "\x1b[32m"  # green


@pytest.fixture(scope="module")
def expected(demo_bundle: Path) -> tuple[str, str]:
    """The answers of two turns."""
    messages = [{"role": "user", "content": QUESTION}]
    with Runtime.open(demo_bundle) as runtime:
        first = runtime.generate(messages, Decoding(max_tokens=24, fork=False)).text
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
        return first, runtime.generate(messages, Decoding(max_tokens=24, fork=False)).text


@pytest.fixture(scope="module")
def service(demo_bundle: Path) -> Iterator[str]:
    """The address of a service with two models, one of which opens later."""
    opener = partial(Runtime.open, demo_bundle, max_requests=2, prefix_cache=True, step_costs="free")
    app = application({"demo": opener, "other": opener}, ServiceOptions(keys=(KEY,)))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@contextmanager
def chat(*arguments: str, program: str = PROGRAM) -> Iterator[Typist]:
    with at_a_terminal(program, *arguments, variables={"SPACEPORT_API_KEY": KEY}) as typist:
        typist.wait_for("Ctrl-D exits")
        typist.wait_for("> ")
        yield typist


def asked(typist: Typist, text: str) -> tuple[str, str]:
    """The answer to a message and the line of statistics below it."""
    typist.type(text)
    typist.wait_for("\n")  # what was typed is shown
    found = typist.wait_for("prompt tokens cached").replace("\r", "").rpartition("\n")
    typist.wait_for("> ")
    return found[0], found[2]


def commanded(typist: Typist, text: str, message: str) -> None:
    """Type a command and wait for what it prints."""
    typist.type(text)
    typist.wait_for("\n")
    typist.wait_for(message)
    typist.wait_for("> ")


@pytest.fixture(params=["bundle", "service"])
def target(request: pytest.FixtureRequest, demo_bundle: Path) -> tuple[str, ...]:
    """Arguments for a chat with the bundle, or with the service that serves it."""
    if request.param == "bundle":
        return (str(demo_bundle), "--threads", "1")
    return (request.getfixturevalue("service"), "--model", "demo")


def test_a_conversation_on_a_terminal(target: tuple[str, ...], expected: tuple[str, str], tmp_path: Path) -> None:
    """The second turn continues the first one and uses its prefix; commands change the conversation."""
    file = tmp_path / "chat.json"
    with chat(*target, *OPTIONS) as typist:
        answer, line = asked(typist, QUESTION)
        assert answer.strip() == expected[0].strip()
        for part in ("24 tokens, ", "tokens/s", "tokens per step"):
            assert part in line
        answer, line = asked(typist, "again")
        assert answer.strip() == expected[1].strip()
        assert int(line.split(", ")[-1].split(" of ")[0]) > 20
        commanded(typist, "/undo", "the last turn is removed")
        assert asked(typist, "again")[0].strip() == expected[1].strip()
        commanded(typist, f"/save {file}", "saved 2 turns")
        commanded(typist, "/reset", "the conversation is empty")
        commanded(typist, f"/load {tmp_path}/none", "none cannot be read")
        commanded(typist, "/nonsense", "/nonsense is no command")
        typist.type('"""')
        for text in ("one", "two", '"""'):
            typist.wait_for(". ")
            typist.type(text)
        typist.wait_for("prompt tokens cached")
        typist.wait_for("> ")
        typist.type("three\\")
        typist.wait_for(". ")
        asked(typist, "four")
        commanded(typist, "/stats", "2 turns, 5 answers")
        commanded(typist, f"/save {file}.lines", "saved 2 turns")
        assert DRAFTED in typist.raw
        typist.type("\x04")
        assert typist.leave() == 0
    lines = json.loads(Path(f"{file}.lines").read_text("utf-8"))
    assert [one["content"] for one in lines[::2]] == ["one\ntwo", "three\nfour"]
    found = json.loads(file.read_text("utf-8"))
    assert [message["role"] for message in found] == ["user", "assistant"] * 2
    assert found[0]["content"] == QUESTION


def test_ctrl_c_ends_the_answer_but_not_the_chat(
    target: tuple[str, ...], expected: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*given: Any) -> Any:
        time.sleep(0.02)
        return run_engine(*given)

    run_engine = OnnxRuntimeEngine.run
    monkeypatch.setattr(OnnxRuntimeEngine, "run", slow)  # that of the service, so that the answer lasts
    file, turns = tmp_path / "chat.json", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps(turns), "utf-8")
    loaded = ("--load", str(file), "--system", "Be short.", "--no-colour")
    with chat(*target, "--temperature", "0", "--no-drafts", *loaded, program=SLOW + PROGRAM) as typist:
        typist.interrupt("Ctrl-D or /exit exits")
        typist.wait_for("> ")
        commanded(typist, f"/save {file}", "saved 1 turns")
        commanded(typist, f"/save {tmp_path}", "exists: choose another name")
        commanded(typist, "/reset", "is empty")
        commanded(typist, "/system", "")
        typist.type(QUESTION)
        typist.wait_for("\n")
        typist.wait_for(expected[0].strip()[:3])
        typist.interrupt("(ended)")
        commanded(typist, "/stats", "1 turns, 0 answers")
        assert DRAFTED not in typist.raw
        typist.type("/exit")
        assert typist.leave() == 0
    assert json.loads(file.read_text("utf-8")) == [{"role": "system", "content": "Be short."}, *turns]


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a chat with a text in a pipe: its exit code, stdout and stderr."""

    def run_piped(*arguments: str, text: str = f"{QUESTION}\n", key: str = KEY) -> tuple[int, str, str]:
        monkeypatch.setenv("SPACEPORT_API_KEY", key)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return run(["chat", *arguments]), *capfd.readouterr()

    return run_piped


def test_a_pipe_gets_the_answer_alone(
    target: tuple[str, ...], expected: tuple[str, str], piped: Callable[..., tuple[int, str, str]]
) -> None:
    assert piped(*target, *OPTIONS) == (0, f"{expected[0]}\n", "")


def test_errors_of_a_service_are_sentences(service: str, piped: Callable[..., tuple[int, str, str]]) -> None:
    for arguments, key, code, message in (
        ((service,), "wrong", 1, "wants a valid key: give its file with --api-key-file"),
        ((service,), KEY, 2, "serves 2 models: choose one with --model: demo, other"),
        ((service, "--model", "third"), KEY, 2, "has no model third: expected one of demo, other"),
        ((f"{service}/nothing", "--model", "demo"), KEY, 1, "has no such model or path: GET /nothing/v1/models"),
        ((service, "--model", "demo", "--temperature", "-1"), KEY, 1, "answered with status 400: temperature is -1"),
        (("http://127.0.0.1:9",), KEY, 1, "no service answers at http://127.0.0.1:9/v1"),
        (("ftp://127.0.0.1",), KEY, 2, "expected one such as http://127.0.0.1:8000"),
    ):
        found, shown, errors = piped(*arguments, key=key)
        assert (found, shown) == (code, ""), errors
        assert message in errors
        assert "Traceback" not in errors
    assert "standard input is empty" in piped(service, "--model", "demo", text="")[2]


class Scripted:
    """A model with one answer."""

    name = "scripted"
    statistics = None

    def __init__(self, spans: list[Span | BaseException]) -> None:
        self._spans = spans
        self.closed = False

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[Span]:
        try:
            for span in self._spans:
                if isinstance(span, BaseException):
                    raise span
                yield span
        finally:
            self.closed = True

    def close(self) -> None:
        pass


def test_an_answer_cannot_change_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    spans: list[Span | BaseException] = [Span("a\x1b[2J\x07\n\tb", False), Span("\x9b", True, "lookup")]
    Chat(Scripted(spans), Conversation()).respond("q")
    shown = capsys.readouterr().out
    assert shown.startswith("a\\x1b[2J\\x07\n\tb")
    assert click.style("\\x9b", fg="cyan", underline=True) in shown
    Chat(Scripted(spans), Conversation(), colours=False).respond("q")
    assert capsys.readouterr().out == "a\\x1b[2J\\x07\n\tb\\x9b\n"
    Chat(Scripted(spans), Conversation(), terminal=False).respond("q")
    assert capsys.readouterr().out == "a\x1b[2J\x07\n\tb\x9b\n"


def test_what_came_before_ctrl_c_stays_and_what_came_before_an_error_does_not() -> None:
    for error, expected in ((KeyboardInterrupt(), ["q", "a"]), (ServiceFault("gone"), [])):
        model, conversation = Scripted([Span("a", False), error, Span("b", False)]), Conversation()
        with pytest.raises(type(error)):
            Chat(model, conversation, colours=False).respond("q")
        assert [message["content"] for message in conversation.messages] == expected
        assert model.closed
    conversation = Conversation()
    with pytest.raises(KeyboardInterrupt):
        Chat(Scripted([KeyboardInterrupt()]), conversation, colours=False).respond("q")
    assert conversation.messages == []


def test_output_that_fails_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise BrokenPipeError

    model = Scripted([Span("a", False), Span("b", False)])
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "flush", fail)
        with pytest.raises(BrokenPipeError) as caught:
            Chat(model, Conversation()).respond("q")
    assert model.closed, caught  # whose frames hold the answer
