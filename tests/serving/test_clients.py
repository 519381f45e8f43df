"""Clients: with keys they share nothing, and without keys pages of other sites cannot use a service on this machine."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from spaceport.serving.application import application
from spaceport.serving.options import ServiceOptions
from support.chat_runtime import RunningService, chat_runtime, running_service

PROMPT = "import json\n\n\ndef load(path):\n" * 4
ASK = json.dumps({"prompt": "a", "max_tokens": 1})


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with running_service({"demo": chat_runtime}, ServiceOptions(allowed_hosts=("box.lan",))) as running:
        yield running


def status(service: RunningService, method: str, path: str, **headers: str) -> int:
    url = urlsplit(service.url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=30)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, ASK if method == "POST" else None, names)
    response = connection.getresponse()
    body = response.read()
    assert response.status < 400 or json.loads(body)["error"]["message"]
    connection.close()
    return response.status


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, 200) for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:80", "127.8.8.8", "[::1]:8000")),
        *((host, 200) for host in ("a.localhost", "box.lan", "box.lan:8000")),
        *((host, 421) for host in ("evil.example:8000", "localhost.evil.example", "192.168.0.7", "[", "")),
    ],
)
def test_a_service_on_loopback_answers_under_names_of_this_machine_only(
    service: RunningService, host: str, expected: int
) -> None:
    assert status(service, "GET", "/v1/models", Host=host) == expected
    assert status(service, "POST", "/v1/completions", Host=host) == expected
    assert status(service, "GET", "/health", Host=host) == 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 200),
        ({"Origin": "http://127.0.0.1:8000"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "https://box.lan"}, 200),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 200),  # what curl sends
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://evil.example", "Content_Type": "text/plain"}, 403),
        ({"Content_Type": "text/plain; charset=utf-8"}, 415),
        ({"Content_Type": "multipart/form-data"}, 415),
    ],
)
def test_a_page_of_another_site_cannot_send_requests(
    service: RunningService, headers: dict[str, str], expected: int
) -> None:
    assert status(service, "POST", "/v1/completions", **headers) == expected


def with_keys(**options: Any) -> TestClient:
    return TestClient(application({"demo": chat_runtime}, ServiceOptions(keys=("sk-a", "sk-b", "sk-c"), **options)))


def ask(client: TestClient, key: str, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 2, **fields}
    return client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


@pytest.mark.parametrize("shares", [False, True])
def test_cached_tokens_tell_nothing_about_prompts_of_other_keys(shares: bool) -> None:
    with with_keys(share_prefixes=shares) as client:

        def cached(key: str, **more: Any) -> int:
            usage = ask(client, key, **more).json()["usage"]
            tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
            return tokens

        ask(client, "sk-c", echo=True, logprobs=1, max_tokens=0)
        assert (cached("sk-a") > 30) == shares
        assert cached("sk-a") > 30
        assert (cached("sk-b") > 30) == shares
        assert cached("sk-a", cache_salt="x") == 0
        assert (cached("sk-b", cache_salt="x") > 30) == shares
        assert ask(client, "sk-a", cache_salt="x" * 257).status_code == 400


def test_a_key_has_a_maximum_of_completions_that_run_or_wait() -> None:
    options = ServiceOptions(keys=("sk-a", "sk-b"), most_client_requests=4)
    with TestClient(application({"demo": lambda: chat_runtime(delay=0.005)}, options)) as client:
        service = client.app.state.service  # type: ignore[attr-defined]
        assert ask(client, "sk-a", n=5).status_code == 429
        assert b'admission_rejections_total{reason="too_many_requests"} 1.0' in service.metrics.text()
        thread = threading.Thread(target=ask, args=(client, "sk-a"), kwargs={"n": 3, "max_tokens": 200})
        thread.start()
        while not service.completions:
            pass
        refused = ask(client, "sk-a", n=2)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert ask(client, "sk-b", n=2).status_code == 200
        assert ask(client, "sk-a", echo=True).status_code == 200
        assert ask(client, "sk-a", temperature=-1).status_code == 400
        thread.join()
        assert not service.completions
        assert ask(client, "sk-a", n=4).status_code == 200


@pytest.mark.parametrize("by_key", [False, True])
def test_keys_are_counted_on_request_only_and_without_their_text(by_key: bool) -> None:
    with with_keys(key_metrics=by_key) as client:
        ask(client, "sk-a", n=2)
        text = client.get("/metrics", headers={"Authorization": "Bearer sk-a"}).text
    assert ("spaceport:key_completions_total" in text) == by_key
    assert ('"} 2.0' in text.partition("key_completions_total{key=")[2][:40]) == by_key
    assert "sk-a" not in text


def test_large_bodies_are_refused_while_too_many_are_read_and_small_ones_are_not() -> None:
    options = ServiceOptions(most_body_bytes=200_000)
    with TestClient(application({"demo": chat_runtime}, options)) as client:
        service = client.app.state.service  # type: ignore[attr-defined]
        large = {"prompt": "a", "max_tokens": 1, "user": "x" * 150_000}
        assert client.post("/v1/completions", json=large).status_code == 200
        service.body_bytes = 100_000
        refused = client.post("/v1/completions", json=large)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_bodies")
        service.body_bytes = 300_000
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert service.body_bytes == 300_000
