"""OpenAPI: the document has every route, field and bound; the page in the docs is up to date, and every route is locked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from inspect import signature
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions as TextCompletions
from openai.resources.responses import Responses
from starlette.routing import Route
from starlette.testclient import TestClient

from spaceport.runtime.limits import DEFAULT_LIMITS, Limits
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.serving.application import application
from spaceport.serving.bodies import IGNORED, SUPPORTED, Own, body_of
from spaceport.serving.call import decodings_of
from spaceport.serving.chat import ChatBody
from spaceport.serving.completions import TextBody
from spaceport.serving.failures import Failure
from spaceport.serving.openapi import BODIES, document
from spaceport.serving.options import ServiceOptions
from spaceport.serving.responses import ResponsesBody
from support.chat_runtime import chat_runtime
from support.paths import DOCS

KEY = {"Authorization": "Bearer right"}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    opener = partial(chat_runtime, limits=Limits(prompt_chars=2000))
    options = ServiceOptions(keys=("first", "right"), most_choices=3, most_bytes=100_000)
    with TestClient(application({"demo": opener}, options)) as found:
        yield found


def test_the_page_of_fields_is_up_to_date() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS / "drawing"))
        page = import_module("service_fields").page()
    assert (DOCS / "service_fields.md").read_text("utf-8") == page, "run: python docs/drawing/service_fields.py"


def test_every_field_is_described_and_no_other() -> None:
    fields = {one.encode_name for kind in BODIES.values() for one in msgspec.structs.fields(kind)}
    fields |= {f"spaceport.{one.encode_name}" for one in msgspec.structs.fields(Own)}
    assert fields == SUPPORTED.keys()
    assert fields & IGNORED == {"metadata", "samplers"}  # one is returned by the Responses API, one checked by /infill


@pytest.mark.parametrize(
    ("kind", "create"),
    [(ChatBody, ChatCompletions.create), (TextBody, TextCompletions.create), (ResponsesBody, Responses.create)],
)
def test_fields_of_the_openai_client_are_known_ignored_or_refused_unless_null(
    kind: type[msgspec.Struct], create: Callable[..., Any]
) -> None:
    base = REQUIRED[kind.__name__]
    known = {one.encode_name for one in msgspec.structs.fields(kind)}
    other = {
        name for name in signature(create).parameters if not name.startswith(("self", "extra_", "timeout"))
    } - known
    body_of(kind, json.dumps({**base, **dict.fromkeys(other)}).encode())
    ignored = {name.partition(".")[0] for name in IGNORED} & other
    body_of(kind, json.dumps({**base, **{name: {"any": 1} for name in ignored}}).encode())
    for name in other - ignored:
        with pytest.raises(Failure, match=f"unknown fields: {name}; leave them out") as caught:
            body_of(kind, json.dumps({**base, name: "something"}).encode())
        assert caught.value.param == name
    assert other >= ({"best_of"} if kind is TextBody else {"moderation"})


def test_the_document_has_every_route_and_only_existing_schemas() -> None:
    app = application({}, ServiceOptions(page=False))
    found = document(app.routes, DEFAULT_LIMITS, ServiceOptions())
    assert found["openapi"] == "3.1.0"
    assert set(found["paths"]) == {
        route.path.replace(":path}", "}") for route in app.routes if isinstance(route, Route)
    }
    assert {path for path, ways in found["paths"].items() if "post" in ways} == BODIES.keys()
    text = json.dumps(found)
    for name in (one.partition('"')[0] for one in text.split("#/components/schemas/")[1:]):
        assert name in found["components"]["schemas"]
    assert "securitySchemes" not in found["components"]


def test_no_route_answers_without_a_valid_key(client: TestClient) -> None:
    found: list[tuple[str, str]] = [
        (method, route.path.replace("{name:path}", "demo"))
        for route in client.app.routes  # type: ignore[attr-defined]
        if isinstance(route, Route)
        for method in sorted(route.methods or ())
    ]
    assert len(found) > 20
    for method, path in [*found, ("GET", "/healthy"), ("POST", "/v1/nothing"), ("DELETE", "/v1/models")]:
        is_open = path == "/" or path.startswith(("/health/", "/page/")) or path == "/health"
        assert method in ("GET", "HEAD") or not is_open
        wrong = [*({"Authorization": f"Bearer {key}"} for key in ("", "righ", "rights")), {"Authorization": "right"}]
        for headers in ({"Host": "evil.example"}, {"X-Api-Key": "right"}, *wrong):
            status = client.request(method, path, headers=headers).status_code
            assert status == (200 if is_open else 401), (method, path)
        for key in ("first", "right"):
            headers = {"Authorization": f"Bearer {key}"}
            assert client.request(method, path, headers=headers, json={}).status_code in (200, 400, 404, 405)


def test_values_beyond_the_bounds_of_the_document_are_refused_by_name(client: TestClient) -> None:
    schemas = client.get("/openapi.json", headers=KEY).json()["components"]["schemas"]
    refused = 0
    for path, kind in BODIES.items():
        for name, schema in schemas[kind.__name__]["properties"].items():
            for branch in schema.get("anyOf", [schema]):
                for value in beyond(branch):
                    given = {**REQUIRED[kind.__name__], "max_tokens": 1, name: value}
                    response = client.post(path, headers=KEY, json=given)
                    if kind.__name__ == "TextBody" and (name, value) == ("max_tokens", 0):
                        continue
                    assert response.status_code == 400, (path, name, response.text)
                    message = response.json()["error"]["message"]
                    of_prompt = ("prompt", "messages", "input_prefix", "input_suffix")
                    assert name.removeprefix("top_") in message or name in of_prompt
                    refused += 1
    assert refused > 60


REQUIRED: dict[str, dict[str, Any]] = {
    "ChatBody": {"messages": [{"role": "user", "content": "a"}]},
    "TextBody": {"prompt": "a"},
    "ResponsesBody": {"input": "a"},
    "InfillBody": {"input_prefix": "a", "input_suffix": "b"},
    "TokenizeBody": {},
    "DetokenizeBody": {"tokens": [1]},
}


def beyond(branch: dict[str, Any]) -> list[Any]:
    """Values just beyond the bounds of a schema."""
    found: list[Any] = []
    if "minimum" in branch:
        found.append(branch["minimum"] - 1)
    if "maximum" in branch:
        found.append(branch["maximum"] + 1)
    if "maxLength" in branch:
        found.append("x" * (branch["maxLength"] + 1))
    if branch.get("minItems") or branch.get("minLength"):
        found.append([] if branch["type"] == "array" else "")
    if "maxItems" in branch:
        item = "x" if branch["items"].get("type") == "string" else 1
        found.append([item] * (branch["maxItems"] + 1))
    if "maxProperties" in branch:
        found.append({str(number): 1.0 for number in range(branch["maxProperties"] + 1)})
    return found


def test_every_option_of_a_request_arrives_in_its_decoding() -> None:
    bundle = SimpleNamespace(manifest=SimpleNamespace(generation_config={}))
    model: Any = SimpleNamespace(runtime=SimpleNamespace(limits=DEFAULT_LIMITS, bundle=bundle))
    given: dict[str, Any] = {"messages": [], "temperature": 0.5, "top_k": -1, "stop": "a", "logit_bias": {"3": -100}}
    given |= {"include_stop_str_in_output": True, "cache_salt": "x", "seed": 7, "n": 2, "top_p": 0.5, "min_tokens": 2}
    given |= {"response_format": {"type": "json_object"}, "logprobs": True}
    own = {"draft_siblings": 2, "draft_rows": 9, "lookup": 3, "max_total_tokens": 50, "prefix_cache": False}
    body = body_of(ChatBody, json.dumps({**given, "spaceport": {**own, "json_whitespace": True}}).encode())
    first, second = decodings_of(body, model, ServiceOptions())
    assert {name: getattr(first, name) for name in own} == own
    assert (first.stops, first.include_stop, first.cache_salt, first.min_tokens) == (("a",), True, "x", 2)
    assert (first.logprobs, first.max_tokens) == (0, None)
    assert (first.fork, first.draft, first.max_depth, first.skip_special_tokens) == (False, "tree", 1, True)
    assert (first.sampling.seed, second.sampling.seed) == (7, 8)
    assert first.sampling == Sampling(0.5, top_p=0.5, banned=[3], seed=7)
    assert first.grammar == Grammar(json_schema={"type": "object"}, json_whitespace=True)
    silent = body_of(TextBody, b'{"prompt": "a"}')
    assert decodings_of(silent, model, ServiceOptions())[0].sampling == Sampling(1.0)
