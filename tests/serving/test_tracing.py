"""Tracing: the spans of requests, in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from starlette.testclient import TestClient

from spaceport.serving.application import application
from support.chat_runtime import chat_runtime

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def traced() -> Iterator[tuple[TestClient, Any]]:
    """A client of a service, and the memory that its spans are in."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from spaceport.serving.tracing import RequestSpans

    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with TestClient(application({"demo": chat_runtime}, spans=RequestSpans(provider))) as client:
        yield client, memory


def test_a_span_has_the_options_and_counts_of_its_request_and_no_text(traced: tuple[TestClient, Any]) -> None:
    client, memory = traced
    given = {"prompt": "planted " * 40, "max_tokens": 12, "temperature": 0.5, "seed": 3, "n": 2, "stop": "planted-stop"}
    headers = {"traceparent": PARENT, "Planted": "planted"}
    asked = partial(client.post, "/v1/completions", json={**given, "user": "planted", "planted": 1}, headers=headers)
    asked()
    answer = asked().json()
    span = memory.get_finished_spans()[-1]
    assert (span.name, span.kind.name) == ("text_completion demo", "SERVER")
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" == PARENT[3:-3]
    found, usage = dict(span.attributes), answer["usage"]
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "demo",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": tuple(one["finish_reason"] for one in answer["choices"]),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "http.response.status_code": 200,
    }
    assert {name: found[name] for name in expected} == expected
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert "planted" not in span.to_json()


def test_spans_of_streams_and_of_errors_end_with_the_response(
    traced: tuple[TestClient, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("planted")

    client, memory = traced
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    for more in ({"stream": True}, {"temperature": -1}, {"model": "planted"}):
        client.post("/v1/chat/completions", json={**chat, **more})
    client.post("/planted", json={})
    monkeypatch.setattr("spaceport.serving.completions.decodings_of", fail)
    client.post("/v1/completions", json={"prompt": "a"})
    spans = memory.get_finished_spans()
    names = ("http.response.status_code", "error.type")
    found = [(one.name, *map(one.attributes.get, names)) for one in spans]
    assert found == [
        ("chat demo", 200, None),
        ("chat demo", 400, "invalid_request_error"),
        ("POST /v1/chat/completions", 404, "model_not_found"),
        ("POST -", 404, None),
        ("text_completion demo", 500, "server_error"),
    ]
    assert [one.status.status_code.name for one in spans] == ["UNSET"] * 4 + ["ERROR"]
    assert spans[0].attributes["gen_ai.usage.output_tokens"] == 3
    assert len({one.context.trace_id for one in spans}) == 5
    assert "planted" not in "".join(one.to_json() for one in spans)


def test_nothing_of_opentelemetry_is_imported_unless_asked_for() -> None:
    imported = "from spaceport.serving import application, server; import spaceport.tools.cli.serve, sys"
    unwanted = "[name for name in sys.modules if name.startswith('opentelemetry')]"
    subprocess.run([sys.executable, "-c", f"{imported}; assert {unwanted} == []"], check=True)
