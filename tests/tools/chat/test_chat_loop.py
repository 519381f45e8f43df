"""Chat loop: a conversation on a terminal and through pipes, with a real bundle and a real service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
import pytest
import uvicorn

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.chat.chat_loop import Chat
from spaceport.tools.chat.conversation import Conversation
from spaceport.tools.chat.service_model import ServiceFault
from spaceport.tools.serve.application import application
from spaceport.tools.serve.options import ServiceOptions
from spaceport.tools.terminal.lanes import Span
from support.paths import DEMO
from support.terminal import Typist, at_a_terminal

pytestmark = pytest.mark.slow

PROGRAM = "import sys; from spaceport.tools.cli import main; sys.argv = ['spaceport', 'chat', *sys.argv[1:]]; main()"
QUESTION = json.loads((DEMO / "prompts.json").read_text("utf-8"))["triangular"]["user"].replace("\n", " ")
OPTIONS = ("--max-tokens", "24", "--temperature", "0")
KEY = "sk-right"


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
def chat(*arguments: str, **variables: str) -> Iterator[Typist]:
    with at_a_terminal(PROGRAM, *arguments, variables={"SPACEPORT_API_KEY": KEY, **variables}) as typist:
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


def test_the_second_turn_continues_the_first_one_and_uses_its_prefix(
    target: tuple[str, ...], expected: tuple[str, str]
) -> None:
    with chat(*target, *OPTIONS) as typist:
        answer, line = asked(typist, QUESTION)
        assert answer.strip() == expected[0].strip()
        assert "24 tokens, " in line
        assert "tokens/s" in line
        assert "tokens per step" in line
        answer, line = asked(typist, "again")
        assert answer.strip() == expected[1].strip()
        assert int(line.split(", ")[-1].split(" of ")[0]) > 20
        typist.type("\x04")
        assert typist.leave() == 0


def test_commands_change_the_conversation(target: tuple[str, ...], expected: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    with chat(*target, *OPTIONS) as typist:
        asked(typist, QUESTION)
        asked(typist, "again")
        commanded(typist, "/undo", "the last turn is removed")
        assert asked(typist, "again")[0].strip() == expected[1].strip()
        commanded(typist, f"/save {file}", "saved 2 turns")
        commanded(typist, "/reset", "the conversation is empty")
        assert asked(typist, QUESTION)[0].strip() == expected[0].strip()
        commanded(typist, f"/load {tmp_path}/none", "none cannot be read")
        commanded(typist, "/nonsense", "/nonsense is no command")
        commanded(typist, "/stats", "1 turns, 4 answers")
        typist.type("/exit")
        assert typist.leave() == 0
    found = json.loads(file.read_text("utf-8"))
    assert [message["role"] for message in found] == ["user", "assistant"] * 2
    assert found[0]["content"] == QUESTION
    with chat(*target, *OPTIONS, "--load", str(file), "--system", "Be short.") as typist:
        commanded(typist, f"/save {file}", "saved 2 turns")
        commanded(typist, f"/save {tmp_path}", "exists: choose another name")
    assert json.loads(file.read_text("utf-8")) == [{"role": "system", "content": "Be short."}, *found]


def test_ctrl_c_ends_the_answer_but_not_the_chat(target: tuple[str, ...], expected: tuple[str, str]) -> None:
    with chat(*target, "--temperature", "0", "--no-drafts") as typist:
        typist.interrupt("Ctrl-D or /exit exits")
        typist.type(QUESTION)
        typist.wait_for("\n")
        typist.wait_for(expected[0].strip()[:3])
        typist.interrupt("(ended)")
        commanded(typist, "/stats", "1 turns, 0 answers")
        commanded(typist, "/reset", "is empty")
        typist.type("/exit")
        assert typist.leave() == 0


def test_a_message_may_have_several_lines(demo_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    with chat(str(demo_bundle), "--max-tokens", "1") as typist:
        typist.type('"""')
        typist.wait_for(". ")
        typist.type("one")
        typist.wait_for(". ")
        typist.type("two")
        typist.wait_for(". ")
        asked(typist, '"""')
        typist.type("three\\")
        typist.wait_for(". ")
        asked(typist, "four")
        commanded(typist, f"/save {file}", "saved 2 turns")
    assert [one["content"] for one in json.loads(file.read_text("utf-8"))[::2]] == ["one\ntwo", "three\nfour"]


def test_draft_tokens_are_coloured_on_a_terminal_only(target: tuple[str, ...]) -> None:
    green = "\x1b[32m"
    for more, variables, coloured in (((), {}, True), (("--no-colour",), {}, False), ((), {"NO_COLOR": "1"}, False)):
        with chat(*target, *OPTIONS, "--max-tokens", "120", *more, **variables) as typist:
            asked(typist, QUESTION)
            assert (green in typist.raw) == coloured


def piped(*arguments: str, text: str = f"{QUESTION}\n", key: str = KEY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SPACEPORT_API_KEY": key},
    )


def test_a_pipe_gets_the_answer_alone(target: tuple[str, ...], expected: tuple[str, str]) -> None:
    done = piped(*target, *OPTIONS)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected[0]}\n", "")


def test_errors_of_a_service_are_sentences(service: str, tmp_path: Path) -> None:
    for arguments, key, code, message in (
        ((service,), "wrong", 1, "wants a valid key: give its file with --api-key-file"),
        ((service,), KEY, 2, "serves 2 models: choose one with --model: demo, other"),
        ((service, "--model", "third"), KEY, 2, "has no model third: expected one of demo, other"),
        ((f"{service}/nothing", "--model", "demo"), KEY, 1, "has no such model or path: GET /nothing/v1/models"),
        ((service, "--model", "demo", "--temperature", "-1"), KEY, 1, "answered with status 400: temperature is -1"),
        (("http://127.0.0.1:9",), KEY, 1, "no service answers at http://127.0.0.1:9/v1"),
        (("ftp://127.0.0.1",), KEY, 2, "expected one such as http://127.0.0.1:8000"),
    ):
        done = piped(*arguments, key=key)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert "standard input is empty" in piped(service, "--model", "demo", text="").stderr


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
    model = Scripted([Span("a", False), Span("b", False)])

    def fail() -> None:
        raise BrokenPipeError

    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "flush", fail)
        with pytest.raises(BrokenPipeError) as caught:
            Chat(model, Conversation()).respond("q")
    assert model.closed, caught  # whose frames hold the answer
