"""Chats: conversations on a terminal and through pipes, with a bundle and with services of ours and of others."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import click
import pytest
import uvicorn

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.runtime.backends.on_onnxruntime import OnnxRuntimeEngine
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.serving.application import application
from spaceport.serving.options import ServiceOptions
from spaceport.tools.chat.conversation import Chat, ChatHistory
from spaceport.tools.chat.models import AnswerOptions, ServiceFault, ServiceModel, root_of
from spaceport.tools.cli import run
from spaceport.tools.terminal.generation import Span
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


Piped = Callable[..., tuple[int, str, str]]
MODELS = json.dumps({"data": [{"id": "m", "owned_by": "someone"}]}).encode()
OURS = json.dumps({"data": [{"id": "m", "owned_by": "spaceport"}]}).encode()
ASKED = [{"role": "user", "content": "a"}]
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}


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
def piped(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Piped:
    """Runs a chat with a text in a pipe: its exit code, stdout and stderr."""

    def run_piped(*arguments: str, text: str = f"{QUESTION}\n", key: str = KEY) -> tuple[int, str, str]:
        monkeypatch.setenv("SPACEPORT_API_KEY", key)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return run(["chat", *arguments]), *capfd.readouterr()

    return run_piped


def test_a_pipe_gets_the_answer_alone(target: tuple[str, ...], expected: tuple[str, str], piped: Piped) -> None:
    assert piped(*target, *OPTIONS) == (0, f"{expected[0]}\n", "")


def test_errors_of_a_service_are_sentences(service: str, piped: Piped) -> None:
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

    name, statistics, closed = "scripted", None, False

    def __init__(self, *spans: Span | BaseException) -> None:
        self._spans = spans

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
    spans = Span("a\x1b[2J\x07\n\tb", False), Span("\x9b", True, "lookup")
    Chat(Scripted(*spans), ChatHistory()).respond("q")
    shown = capsys.readouterr().out
    assert shown.startswith("a\\x1b[2J\\x07\n\tb")
    assert click.style("\\x9b", fg="cyan", underline=True) in shown
    Chat(Scripted(*spans), ChatHistory(), colours=False).respond("q")
    assert capsys.readouterr().out == "a\\x1b[2J\\x07\n\tb\\x9b\n"
    Chat(Scripted(*spans), ChatHistory(), terminal=False).respond("q")
    assert capsys.readouterr().out == "a\x1b[2J\x07\n\tb\x9b\n"


def test_what_came_before_ctrl_c_stays_and_what_came_before_an_error_does_not() -> None:
    for error, expected in ((KeyboardInterrupt(), ["q", "a"]), (ServiceFault("gone"), [])):
        model, conversation = Scripted(Span("a", False), error, Span("b", False)), ChatHistory()
        with pytest.raises(type(error)):
            Chat(model, conversation, colours=False).respond("q")
        assert [message["content"] for message in conversation.messages] == expected
        assert model.closed
    conversation = ChatHistory()
    with pytest.raises(KeyboardInterrupt):
        Chat(Scripted(KeyboardInterrupt()), conversation, colours=False).respond("q")
    assert conversation.messages == []


def conversation(system: str | None = None) -> ChatHistory:
    found = ChatHistory(system)
    for text in ("one", "two"):
        found.add("user", text)
        found.add("assistant", f"re: {text}")
    return found


def contents(found: ChatHistory) -> list[str]:
    return [message["content"] for message in found.messages]


def test_a_file_with_other_content_changes_nothing(tmp_path: Path) -> None:
    file, found = tmp_path / "chat.json", conversation()
    before = found.messages
    for content, message in (
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "has other content"),
        ('[{"role": "user"}]', "has other content"),
        ('[{"role": "nobody", "content": "a"}]', "has other content"),
        ('[{"role": "user", "content": 3}]', "has other content"),
    ):
        file.write_text(content, "utf-8")
        with pytest.raises(InputFault, match=message):
            found.load(file)
        assert found.messages == before


def events(*contents: Any, done: bool = True) -> bytes:
    lines = [b": ping\n\n", *(b"data: " + json.dumps(content).encode() + b"\n\n" for content in contents)]
    return b"".join(lines) + (b"data: [DONE]\n\n" if done else b"")


def delta(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None, **more}]}


@contextmanager
def other_service(
    answer: bytes, *, models: bytes = MODELS, status: int = 200, **headers: str
) -> Iterator[tuple[str, list[Any]]]:
    """The address of a service with one answer, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, self.headers.get("authorization"), body))
            self.answer(status, answer)

        def answer(self, code: int, content: bytes) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_a_service_of_others_is_asked_with_common_fields_only() -> None:
    with other_service(events(delta("a"), delta("b"), END, USAGE)) as (address, asked):
        model = ServiceModel(address, None, "sk-1", AnswerOptions(max_tokens=4))
        assert list(model.answer(ASKED)) == [Span("a", False), Span("b", False)]
        ((path, key, body),) = asked
    assert (path, key) == ("/v1/chat/completions", "Bearer sk-1")
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    assert body == {"model": "m", "messages": ASKED, "max_tokens": 4, **streamed}
    found = model.statistics
    assert found is not None
    assert (found.tokens, found.prompt_tokens, found.cached_tokens, found.steps) == (4, 9, 0, None)
    assert found.line().startswith("4 tokens, ")
    assert found.line().endswith("ending: length")


def test_the_sources_of_draft_tokens_are_read_if_they_make_up_the_text() -> None:
    pieces = [
        {"text": "a", "drafted": False},
        {"text": "b", "drafted": True, "source": "lookup"},
        {"text": "c", "drafted": True, "source": "unheard of"},
    ]
    sent = events(delta("abc", spaceport={"pieces": pieces}), delta("xyz", spaceport={"pieces": pieces}))
    with other_service(sent, models=OURS) as (address, asked):
        model = ServiceModel(address, "m", None, AnswerOptions(drafts=False))
        spans = list(model.answer(ASKED))
        assert asked[0][2]["spaceport"] == {"fork": False, "threads": True, "mask_slots": 0, "lookup": 0}
    assert spans == [Span("a", False), Span("b", True, "lookup"), Span("c", True, "unheard of"), Span("xyz", False)]
    assert model.statistics is None


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (401, b"", "wants a valid key"),
        (404, b'{"error": {"message": "no m"}}', "has no such model or path: no m"),
        (503, b'{"error": {"message": "the queue is full"}}', "busy or not ready: the queue is full; try again"),
        (302, b"", "redirects to http://elsewhere"),
        (500, b"<html>", "answered with status 500"),
        (200, events(delta("a"), {"error": {"message": "it stops"}}), "ended the answer: it stops"),
        (200, events(delta("a"), done=False), "broke before the answer ended"),
        (200, b"data: 3\n\n", "no JSON object"),
    ],
)
def test_a_failure_is_a_sentence(status: int, answer: bytes, message: str) -> None:
    with other_service(answer, status=status, Location="http://elsewhere") as (address, asked):
        model = ServiceModel(address, None, "sk-1", AnswerOptions())
        with pytest.raises(ServiceFault, match=message) as caught:
            list(model.answer(ASKED))
        assert len(asked) == 1
    assert "sk-1" not in str(caught.value)


def test_what_is_no_service_or_no_key_is_refused() -> None:
    for models in (b"", b"[]", b'{"data": [1]}', b"<html>"):
        with other_service(b"", models=models) as (address, _), pytest.raises(InputFault, match="lists no models"):
            ServiceModel(address, None, None, AnswerOptions())
    for key in ("sk-é", "a\nb"):
        with pytest.raises(OptionFault, match="printable ASCII") as caught:
            ServiceModel("http://127.0.0.1:9", None, key, AnswerOptions())
        assert key not in str(caught.value)
    for given in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert root_of(given) == "http://h:1/v1"
    for wrong in ("file:///etc/passwd", "http://", "http://user:secret@h", "http://h?x=1", "h:1"):
        with pytest.raises(OptionFault, match="is no address of a service"):
            root_of(wrong)
