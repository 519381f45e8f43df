"""Hostile bodies: whatever a client sends, the service answers or says what is wrong, and goes on as before."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from starlette.testclient import TestClient

from spaceport.runtime.limits import DEFAULT_LIMITS, Limits
from spaceport.serving.application import application
from spaceport.serving.bodies import IGNORED, SUPPORTED, body_of
from spaceport.serving.completions import TextBody
from spaceport.serving.failures import Failure
from spaceport.serving.openapi import BODIES, document
from spaceport.serving.options import ServiceOptions
from support.chat_runtime import chat_runtime
from support.traced_memory import least_peak

MOST_GROWTH = 400 << 20  # bytes of resident memory that all bodies of a test may add
SCHEMAS = document([], DEFAULT_LIMITS, ServiceOptions())["components"]["schemas"]
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "import json"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "import json", "max_tokens": 3},
    "/v1/responses": {"input": "import json", "max_output_tokens": 3},
    "/infill": {"input_prefix": "import", "input_suffix": "json", "n_predict": 3},
    "/tokenize": {"prompt": "import json"},
    "/detokenize": {"tokens": [1, 2, 3]},
}


def deep(levels: int, key: str | None) -> Any:
    """This number of arrays or objects in each other."""
    inner = None
    for _ in range(levels):
        inner = [inner] if key is None else {key: inner}
    return inner


# Wrong values

SPELLINGS = ["\ud800", "a\udfff", "<s></s>[INST]", "{{ 7 * 7 }}", "{% for a in b %}", "../../etc/passwd", "(a+)+$"]
LONG = [sign * count for sign in ("a", "\n", "(", "é") for count in (300, 5000)]
TEXTS = some.text(max_size=40) | some.text("\x00\x1b\x7f\u2028\ufeff\ufffd\u202e", max_size=5)
TEXTS |= some.sampled_from([*SPELLINGS, *LONG])
NUMBERS: Any = some.integers(-3, 40) | some.floats(allow_nan=True, allow_infinity=True)
NUMBERS |= some.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400, 1e308, 5e-324, -0.0])
JSON_SCHEMAS = some.sampled_from(
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"allOf": [{"enum": ["a"]}, {"enum": ["b"]}]},
        {"type": "string", "pattern": "(a|aa)+b{1,9999}"},
        {"type": "array", "minItems": 10**9},
        {"type": "nothing", "const": 10**50},
    ]
)
TOOL = {"type": "function", "function": {"name": "b"}}
PARTS = some.sampled_from(
    [
        TOOL,
        [TOOL],
        [{"type": "function", "function": {"name": "a" * 3000, "parameters": {"$ref": "#"}}}],
        [{"type": "function", "function": None}],
        [{"role": "user", "content": [{"type": "text", "text": 3}]}],
        [{"role": "\x00", "content": "a", "tool_call_id": 3}],
        [{"role": "assistant", "content": "", "tool_calls": [{}]}],
        [{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": 1, "arguments": "{"}}]}],
    ]
)
VALUES = some.recursive(
    some.one_of(some.none(), some.booleans(), NUMBERS, TEXTS, JSON_SCHEMAS, PARTS),
    lambda inner: some.one_of(some.lists(inner, max_size=4), some.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
) | some.builds(deep, some.sampled_from([3, 70, 900]), some.sampled_from([None, "schema", "properties"]))

# Values of the right types, so that requests get as far as the engine

ROLES = some.sampled_from(["user", "assistant", "system", "tool", "developer"])
TURNS = some.lists(some.builds(lambda role, text: {"role": role, "content": text}, ROLES, TEXTS), max_size=4)
TYPED: dict[str, Any] = {
    "messages": TURNS,
    "input": TEXTS | TURNS,
    "prompt": some.one_of(TEXTS, some.lists(some.integers(-1, 1300), max_size=9), some.lists(TEXTS, max_size=3)),
    "spaceport": some.one_of(
        some.builds(lambda schema: {"json_schema": schema}, JSON_SCHEMAS),
        some.builds(
            lambda regex: {"regex": regex}, some.sampled_from(["[a-c]+", "\\d{2,9}", "(?i)a", "(?=a)b", "\\1"])
        ),
    ),
    "tools": PARTS,
    "tool_choice": some.sampled_from(["auto", "none", "required", TOOL]),
    "stop": TEXTS | some.lists(TEXTS, max_size=4),
    "logit_bias": some.dictionaries(some.integers(0, 1279).map(str) | TEXTS, some.floats(-100, 100), max_size=4),
}


def _typed(schema: dict[str, Any]) -> Any:
    """Values of the simple types that a field has in the service's document, mostly within its bounds."""
    kinds = {branch.get("type") for branch in schema.get("anyOf", [schema])}
    least, most = schema.get("minimum", -3), min(schema.get("maximum", 40), 2000)
    numbers = some.integers(least, most) | some.floats(least, most) | some.integers(-(2**63), 2**64 - 1)
    return numbers if kinds & {"integer", "number"} else some.booleans() | TEXTS


def _encoded(path: str) -> Any:
    """Bodies for an endpoint, right and wrong."""
    wrong = some.dictionaries(
        some.sampled_from([*SUPPORTED, *sorted(IGNORED), "other"]), VALUES, min_size=1, max_size=3
    )
    fields = SCHEMAS[BODIES[path].__name__]["properties"]
    values = {name: TYPED.get(name, _typed(field)) for name, field in fields.items()}
    right = some.sets(some.sampled_from(sorted(values)), max_size=6).flatmap(
        lambda names: some.fixed_dictionaries({name: values[name] for name in sorted(names)})
    )
    return (right | wrong).map(lambda fields: (path, json.dumps({**BASES[path], **fields}).encode()))


def _spoilt(body: tuple[str, bytes], at: int, kind: str) -> tuple[str, bytes]:
    """A body that is damaged at an index."""
    path, raw = body
    index = at % (len(raw) + 1)
    damage = {
        "cut": raw[:index],
        "byte": raw[:index] + b"\xff\xc0" + raw[index + 1 :],
        "twice": raw + raw,
        "nested": b"[" * (at % 200_000) + raw,
        "number": raw.replace(b"3", b"9" * (at % 20_000 + 1), 1),
        "wide": raw.decode("ascii").encode("utf-16"),
    }
    return path, damage[kind]


RIGHT = some.one_of(*(_encoded(path) for path in BASES))
KINDS = ["cut", "byte", "twice", "nested", "number", "wide"]
DAMAGED = some.builds(_spoilt, RIGHT, some.integers(0, 10**6), some.sampled_from(KINDS))
ANY = some.one_of(RIGHT, RIGHT, RIGHT, DAMAGED, some.tuples(some.sampled_from([*BASES]), some.binary(max_size=60)))


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    opener = partial(chat_runtime, max_seq_len=128, limits=Limits(prompt_chars=4000, queued_prompt_tokens=20_000))
    options = ServiceOptions(most_bytes=300_000, request_timeout=5.0)
    with TestClient(application({"demo": opener}, options), raise_server_exceptions=False) as found:
        yield found


def check(client: TestClient, path: str, raw: bytes) -> None:
    """Send a body: it is answered, or refused with a reason that is not the service's own fault."""
    response = client.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404, 413, 503), (response.status_code, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert 0 < len(error["message"]) < 2000, error["message"][:300]
        assert error.keys() == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert "server_error" not in response.text
    else:
        response.json()


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
@pytest.mark.parametrize("examples", [150, pytest.param(1500, marks=pytest.mark.nightly)])
def test_hostile_bodies_are_answered_or_refused_and_change_nothing(client: TestClient, examples: int) -> None:
    assert BASES.keys() == BODIES.keys()
    ask = {"prompt": "import json\n", "max_tokens": 20, "temperature": 0}
    before = client.post("/v1/completions", json=ask).json()["choices"]
    memory = resident()
    settings(max_examples=examples)(given(ANY)(lambda body: check(client, *body)))()
    assert client.get("/load").json()["server_load"] == 0
    assert client.get("/health").status_code == 200
    assert client.post("/v1/completions", json=ask).json()["choices"] == before
    assert resident() - memory < MOST_GROWTH


def test_values_of_unknown_fields_are_never_built() -> None:
    raw = json.dumps({"prompt": "a", "unknown": [[1]] * 200_000, "metadata": [[1]] * 200_000}).encode()
    ignored = json.dumps({"prompt": "a", "metadata": [[1]] * 200_000}).encode()

    def read() -> None:
        with pytest.raises(Failure, match="unknown fields: unknown;"):
            body_of(TextBody, raw)
        assert body_of(TextBody, ignored).prompt == "a"

    assert least_peak(read) < 3 * len(raw)  # a list costs 20 times its text


MANY_PARTS = {"role": "user", "content": [{"type": "text", "text": ""}] * 5000}
MANY_BIASES = {"n": 16, "logit_bias": dict.fromkeys(map(str, range(5000)), 1)}
MANY_TURNS = {"messages": [{"role": "user", "content": "a"}] * 30_000}
EMPTY_MESSAGES = {"prompt": None, "messages": [{}] * 5000}
LARGE = {"type": "object", "properties": {f"name{index:05}": {"type": "string"} for index in range(2500)}}


@pytest.mark.parametrize(
    ("path", "fields", "status", "message"),
    [
        ("/tokenize", EMPTY_MESSAGES, 400, "messages has 5000 entries: expected at most 4096"),
        ("/v1/responses", {"input": [{}] * 5000}, 400, "input has 5000 entries: expected at most 4096"),
        ("/v1/chat/completions", {"messages": [MANY_PARTS]}, 400, "a message has 5000 parts: expected at most 4096"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 1400}] * 3}, 400, "prompt_chars"),
        ("/v1/chat/completions", MANY_TURNS, 413, "more than 300000 bytes"),
        ("/v1/completions", MANY_BIASES, 400, "logit_bias has 5000 entries: expected at most 1024"),
        ("/v1/completions", {"prompt": "x" * 4001}, 400, "prompt_chars"),
        ("/v1/completions", {"prompt": ["x"] * 65}, 400, "65 prompts: expected at most 64"),
        ("/v1/completions", {"max_tokens": 10**9}, 200, "finish_reason"),
        ("/v1/completions", {"max_tokens": 10**4300 - 1}, 400, "max_tokens has more than 64 bits"),
        ("/v1/completions", {"prompt": [10**3000]}, 400, "…"),  # the end of a message that would repeat it
        ("/v1/completions", {"spaceport": {"json_schema": LARGE}}, 400, "the grammar has"),
        ("/v1/completions", {"spaceport": {"max_threads": 33, "fork": True}}, 400, "max_threads is 33"),
        ("/detokenize", {"tokens": [1] * 5000}, 400, "tokens has 5000 entries: expected at most 4000"),
    ],
)
def test_limits_hold_before_any_work(
    client: TestClient, path: str, fields: dict[str, Any], status: int, message: str
) -> None:
    response = client.post(path, json={**BASES[path], **fields})
    assert (response.status_code, message in response.text) == (status, True), response.text
