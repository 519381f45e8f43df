"""Request log: ids in and out, one entry for each request, and nothing that a client sent."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient

from spaceport.serving.application import application
from spaceport.serving.options import ServiceOptions
from spaceport.serving.request_log import MOST_CHARACTERS, JsonLines, TextLines, configure_logging
from support.chat_runtime import chat_runtime

KEY = "sk-planted-key"
SECRET = re.compile("planted", re.IGNORECASE)


@contextmanager
def logged(formatter: logging.Formatter, level: int = logging.DEBUG) -> Iterator[io.StringIO]:
    """What all loggers but those of the test's client write meanwhile."""
    text, root = io.StringIO(), logging.getLogger()
    handler, before = logging.StreamHandler(text), root.level
    handler.setFormatter(formatter)
    handler.addFilter(lambda entry: not entry.name.startswith("http"))
    root.addHandler(handler)
    root.setLevel(level)
    try:
        yield text
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


def entries(text: io.StringIO, message: str = "request ended") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.getvalue().splitlines()]
    return [each for each in found if each["message"] == message]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(application({"demo": chat_runtime}, ServiceOptions(keys=(KEY,), audit_rate=1.0))) as found:
        found.headers.update({"Authorization": f"Bearer {KEY}"})
        yield found


def complete(client: TestClient, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    given = {"prompt": "import json\n", "max_tokens": 4, "temperature": 0, **fields}
    return client.post("/v1/completions", json=given, headers=headers or {})


def test_ids_are_those_of_the_client_if_they_are_printable_and_short(client: TestClient) -> None:
    longest = "x" * MOST_CHARACTERS
    with logged(JsonLines()) as text:
        found = complete(client, {"X-Request-Id": longest})
    assert (found.json()["id"], found.headers["x-request-id"]) == (f"cmpl-{longest}", longest)
    assert [(entry["id"], entry["answer"]) for entry in entries(text)] == [(longest, f"cmpl-{longest}")]
    for wrong in ("", "a b", longest + "x", "s\xe9", "\x7f"):
        headers = [(b"X-Request-Id", wrong.encode("latin-1"))]
        found = {client.get("/v1/models", headers=headers).headers["x-request-id"] for _ in range(2)}
        assert [re.fullmatch("[0-9a-f]{32}", one) is not None for one in found] == [True, True]
    with logged(JsonLines()) as text:
        for path, key in (("/nothing", KEY), ("/v1/models", "no")):
            response = client.get(path, headers={"X-Request-Id": "wrong", "Authorization": f"Bearer {key}"})
            assert response.headers["x-request-id"] == "wrong"
    assert [entry["route"] for entry in entries(text)] == ["-", "/v1/models"]


# Entries


@pytest.mark.parametrize("stream", [False, True])
def test_an_entry_has_the_counts_of_the_answer(client: TestClient, stream: bool) -> None:
    with logged(JsonLines(), logging.INFO) as text:
        complete(client, prompt=["import json\n", "import os\n"], max_tokens=12, n=2, stream=stream)
        client.get("/health")
        client.get("/metrics")
    (entry,) = entries(text)
    usage = complete(client, prompt=["import json\n", "import os\n"], max_tokens=12, n=2).json()["usage"]
    assert entry["route"] == "/v1/completions"
    assert (entry["status"], entry["model"], entry["choices"], entry["level"]) == (200, "demo", 4, "info")
    assert entry["ending"] in ("total", "length", "end", "max_tokens")
    assert entry["prompt_tokens"] == usage["prompt_tokens"]
    assert entry["tokens"] == usage["completion_tokens"] == 48
    assert 0 < entry["first_token_seconds"] <= entry["seconds"]
    assert entry["accepted_tokens"] + entry["steps"] >= 48
    assert entry["draft_tokens"] >= entry["accepted_tokens"] > 0


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_nothing_that_a_client_sends_is_logged(client: TestClient, level: int) -> None:
    planted = "planted secret"
    schema = {"type": "object", "properties": {planted: {"const": planted}}, "required": [planted]}
    tool = {"type": "function", "function": {"name": "planted", "description": planted, "parameters": schema}}
    messages = [{"role": "user", "content": planted, "name": "planted"}]
    with_messages: list[dict[str, Any]] = [
        {"user": planted, "tools": [tool], "cache_salt": planted, "stop": [planted]},
        {"chat_template_kwargs": {"planted": planted}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": planted}}}},
        {"model": "planted"},
        {"messages": [{"role": "planted", "content": planted}]},
        {"messages": planted},
    ]
    fields: list[dict[str, Any]] = [
        *({"messages": messages, **each} for each in with_messages),
        {"input": planted, "instructions": planted, "metadata": {"planted": planted}, "safety_identifier": planted},
        {"prompt": planted, "max_tokens": planted},
        {"prompt": planted, "stream": True},
        {"prompt": [planted], "echo": True, "logprobs": 1},
        {"prompt": "a", "planted": planted, "spaceport": {"planted": 1}},
    ]
    with logged(TextLines(), level) as text, logged(JsonLines(), level) as lines:
        for each in fields:
            kind = "responses" if "input" in each else "chat/completions" if "messages" in each else "completions"
            response = client.post(f"/v1/{kind}", json={"max_tokens": 2, **each})
            assert response.status_code in (200, 400, 404)
        client.post("/v1/completions", content=b'{"planted": planted')
        client.post("/tokenize", json={"prompt": planted})
        client.get("/v1/models/planted")
        client.get("/planted?planted=planted", headers={"Planted": "planted", "User-Agent": "planted"})
        client.get("/v1/models", headers={"Authorization": "Bearer planted", "X-Request-Id": "planted secret"})
    assert text.getvalue().count("request ended") == len(fields) + 5 == len(entries(lines))
    assert SECRET.findall(text.getvalue() + lines.getvalue()) == []


def test_an_unknown_error_is_answered_and_logged_without_its_message(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "".join(["plan", "ted"])  # the stack has lines of this file

    def fail(*_: Any) -> None:
        try:
            raise KeyError(message)
        except KeyError as error:
            raise ValueError(message) from error

    monkeypatch.setattr("spaceport.serving.call.decodings_of", fail)
    with logged(JsonLines()) as text:
        response = complete(client, {"X-Request-Id": "bug"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "bug")
    assert response.json()["error"]["type"] == "server_error"
    (failure,) = entries(text, "a request failed")
    assert failure["id"] == "bug"
    assert "in fail\n" in failure["exception"]
    assert failure["exception"].endswith("KeyError")
    assert SECRET.findall(text.getvalue() + response.text) == []
    assert [each["status"] for each in entries(text)] == [500]


def test_other_libraries_log_no_debug_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    configure_logging("json", "debug")
    assert (logging.root.level, logging.getLogger("spaceport").level) == (logging.INFO, logging.DEBUG)
    assert not logging.getLogger("uvicorn.error").isEnabledFor(logging.INFO)  # looks like an error, and says "started"
