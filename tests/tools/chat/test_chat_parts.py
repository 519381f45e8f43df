"""Conversations, and services that are not Spaceport's, that fail, or that send what they should not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.tools.chat.chat_model import AnswerOptions
from spaceport.tools.chat.conversation import Conversation
from spaceport.tools.chat.service_model import ServiceFault, ServiceModel, root_of
from spaceport.tools.terminal.lanes import Span

MODELS = json.dumps({"data": [{"id": "m", "owned_by": "someone"}]}).encode()
OURS = json.dumps({"data": [{"id": "m", "owned_by": "spaceport"}]}).encode()
ASKED = [{"role": "user", "content": "a"}]
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}


def conversation(system: str | None = None) -> Conversation:
    found = Conversation(system)
    for text in ("one", "two"):
        found.add("user", text)
        found.add("assistant", f"re: {text}")
    return found


def contents(found: Conversation) -> list[str]:
    return [message["content"] for message in found.messages]


def test_undo_removes_the_last_turn_and_reset_all_but_the_system_prompt() -> None:
    found = conversation("sys")
    assert found.turns == 2
    assert found.undo()
    assert contents(found) == ["sys", "one", "re: one"]
    found.add("user", "unanswered")
    assert found.undo()
    assert contents(found) == ["sys", "one", "re: one"]
    found.reset()
    assert contents(found) == ["sys"]
    assert not found.undo()
    found.add("user", "one")
    for system, first in (("a", "a"), ("b", "b"), (None, "one")):  # it is replaced and comes first
        found.set_system(system)
        assert contents(found)[0] == first


def test_a_file_has_the_messages_and_paths_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    file, found = tmp_path / "chat.json", conversation("é\n")
    found.save(file)
    loaded = Conversation("other")
    loaded.load(file)
    assert loaded.messages == found.messages
    with pytest.raises(InputFault, match="cannot be read"):
        loaded.load(tmp_path / "none")
    with pytest.raises(InputFault, match="cannot be written"):
        loaded.save(tmp_path / "none" / "file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "has other content"),
        ('[{"role": "user"}]', "has other content"),
        ('[{"role": "nobody", "content": "a"}]', "has other content"),
        ('[{"role": "user", "content": 3}]', "has other content"),
    ],
)
def test_a_file_with_other_content_changes_nothing(tmp_path: Path, content: str, message: str) -> None:
    file, found = tmp_path / "chat.json", conversation()
    file.write_text(content, "utf-8")
    before = found.messages
    with pytest.raises(InputFault, match=message):
        found.load(file)
    assert found.messages == before


def events(*contents: Any, done: bool = True) -> bytes:
    lines = [b": ping\n\n", *(b"data: " + json.dumps(content).encode() + b"\n\n" for content in contents)]
    return b"".join(lines) + (b"data: [DONE]\n\n" if done else b"")


def delta(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None, **more}]}


@contextmanager
def service(
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
    with service(events(delta("a"), delta("b"), END, USAGE)) as (address, asked):
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
    with service(sent, models=OURS) as (address, asked):
        model = ServiceModel(address, "m", None, AnswerOptions(drafts=False))
        spans = list(model.answer(ASKED))
        assert asked[0][2]["disable_spec_decode"] is True
    assert spans == [Span("a", False), Span("b", True, "lookup"), Span("c", True), Span("xyz", False)]
    assert model.statistics is None


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (401, b"", "wants a valid key"),
        (404, b'{"error": {"message": "no m"}}', "has no such model or path: no m"),
        (503, b'{"error": {"message": "the queue is full"}}', "busy or not ready: the queue is full; try again"),
        (429, b"", "busy or not ready"),
        (302, b"", "redirects to http://elsewhere"),
        (307, b"", "redirects to http://elsewhere"),
        (500, b"<html>", "answered with status 500"),
        (200, events(delta("a"), {"error": {"message": "it stops"}}), "ended the answer: it stops"),
        (200, events(delta("a"), done=False), "broke before the answer ended"),
        (200, b"data: {\n\n", "broke: "),
        (200, b"data: 3\n\n", "no JSON object"),
    ],
)
def test_a_failure_is_a_sentence(status: int, answer: bytes, message: str) -> None:
    with service(answer, status=status, Location="http://elsewhere") as (address, asked):
        model = ServiceModel(address, None, "sk-1", AnswerOptions())
        with pytest.raises(ServiceFault, match=message) as caught:
            list(model.answer(ASKED))
        assert len(asked) == 1
    assert "sk-1" not in str(caught.value)


def test_what_is_no_service_or_no_key_is_refused() -> None:
    for models in (b"", b"[]", b'{"data": [1]}', b"<html>"):
        with service(b"", models=models) as (address, _), pytest.raises(InputFault, match="lists no models"):
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
