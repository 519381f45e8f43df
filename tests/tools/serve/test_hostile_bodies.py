"""Hostile bodies: whatever a client sends, the service answers or says what is wrong, and goes on as before."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from starlette.testclient import TestClient

from spaceport.runtime.limits import Limits
from spaceport.tools.serve.application import application
from spaceport.tools.serve.fields import IGNORED, REFUSED, SUPPORTED
from spaceport.tools.serve.openapi import BODIES
from spaceport.tools.serve.options import ServiceOptions
from support.chat_runtime import chat_runtime

MOST_GROWTH = 400 << 20  # bytes of resident memory that all bodies of a test may add

BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "import json"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "import json", "max_tokens": 3},
    "/v1/responses": {"input": "import json", "max_output_tokens": 3},
    "/tokenize": {"prompt": "import json"},
    "/detokenize": {"tokens": [1, 2, 3]},
}


def deep(levels: int, inner: Any, key: str | None) -> Any:
    """A value inside of this number of arrays or objects."""
    for _ in range(levels):
        inner = [inner] if key is None else {key: inner}
    return inner


TEXTS = some.one_of(
    some.text(max_size=40),
    some.text("\x00\x1b\x7f\u2028\ufeff\ufffd\u202e", max_size=5),
    some.sampled_from(
        ["\ud800", "a\udfff", "<s></s>[INST]", "{{ 7 * 7 }}", "{% for a in b %}", "../../etc/passwd", "(a+)+$"]
    ),
    some.builds(
        lambda sign, count: sign * count, some.sampled_from(["a", "\n", "(", "é"]), some.sampled_from([300, 5000])
    ),
)
NUMBERS = some.one_of(
    some.integers(-3, 40),
    some.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400]),
    some.floats(allow_nan=True, allow_infinity=True),
    some.sampled_from([1e308, -1e308, 5e-324, 0.1, -0.0]),
)
SCHEMAS = some.sampled_from(
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"$ref": "#/definitions/none"},
        {"allOf": [{"enum": ["a"]}, {"enum": ["b"]}]},
        {"type": "string", "pattern": "(a|aa)+b{1,9999}"},
        {"type": "array", "minItems": 10**9},
        {"type": "nothing"},
        {"const": 10**50},
    ]
)
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "a" * 3000, "parameters": {"type": "object"}},
    {"name": "a", "parameters": {"$ref": "#"}},
]
CALL = {"id": 1, "type": "function", "function": {"name": 1, "arguments": "{"}}
PARTS = some.sampled_from(
    [
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": 3}]}],
        [{"role": "\x00", "content": "a"}],
        [{"role": "tool", "content": "a", "tool_call_id": 3}],
        *([{"role": "assistant", "content": "", "tool_calls": [call]}] for call in ({}, CALL)),
        *([{"type": "function", "function": function}] for function in FUNCTIONS),
        [{"type": "function"}],
        {"type": "function", "function": {"name": "b"}},
    ]
)
VALUES = some.recursive(
    some.one_of(some.none(), some.booleans(), NUMBERS, TEXTS, SCHEMAS, PARTS),
    lambda inner: some.one_of(some.lists(inner, max_size=4), some.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
) | some.builds(
    deep, some.sampled_from([3, 70, 900]), some.none(), some.sampled_from([None, "a", "schema", "properties"])
)
OBJECTS = some.one_of(
    some.builds(lambda name, value: {name: value}, some.sampled_from(["json", "regex", "choice", "grammar"]), VALUES),
    some.builds(lambda value: {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}, VALUES),
    some.builds(
        lambda name, value: {name: value},
        some.sampled_from(
            ["mask_slots", "draft_rows", "lookup", "fork", "max_threads", "max_depth", "threads", "trace"]
        ),
        VALUES,
    ),
)
FLAGS = some.booleans()
MESSAGES = some.lists(
    some.fixed_dictionaries(
        {
            "role": some.sampled_from(["user", "assistant", "system", "tool", "developer"]),
            "content": TEXTS | some.lists(some.builds(lambda text: {"type": "text", "text": text}, TEXTS), max_size=3),
        }
    ),
    max_size=4,
)
GRAMMARS = some.one_of(
    some.builds(lambda schema: {"json": schema}, SCHEMAS),
    some.builds(
        lambda regex: {"regex": regex}, TEXTS | some.sampled_from(["[a-c]+", "\\d{2,9}", "(?i)a", "(?=a)b", "\\1"])
    ),
    some.builds(lambda texts: {"choice": texts}, some.lists(TEXTS, max_size=4)),
)
# Values of the right types, so that requests get as far as the engine.
TYPED = {
    "messages": MESSAGES,
    "prompt": some.one_of(TEXTS, some.lists(some.integers(-1, 1300), max_size=9), some.lists(TEXTS, max_size=3)),
    "input": TEXTS | MESSAGES,
    "max_tokens": some.integers(0, 40),
    "temperature": some.floats(0, 3),
    "top_p": some.floats(0, 1),
    "top_k": some.integers(-1, 2000),
    "min_p": some.floats(0, 1),
    "repetition_penalty": some.floats(0.01, 100),
    "frequency_penalty": some.floats(-2, 2),
    "seed": some.integers(-(2**63), 2**64 - 1),
    "n": some.integers(1, 4),
    "stop": TEXTS | some.lists(TEXTS, max_size=3),
    "stop_token_ids": some.lists(some.integers(0, 1279), max_size=4),
    "logit_bias": some.dictionaries(some.integers(0, 1279).map(str), some.floats(-100, 100), max_size=4),
    "min_tokens": some.integers(0, 5),
    "logprobs": FLAGS | some.integers(0, 20),
    "top_logprobs": some.integers(0, 20),
    "cache_salt": TEXTS,
    "request_id": TEXTS,
    "user": TEXTS,
    "instructions": TEXTS,
    "structured_outputs": GRAMMARS,
    "tools": PARTS,
    "tool_choice": some.sampled_from(["auto", "none", "required"]) | PARTS,
    "chat_template_kwargs": some.dictionaries(TEXTS, VALUES, max_size=2),
    "metadata": some.dictionaries(TEXTS, TEXTS, max_size=2),
    "stream_options": some.fixed_dictionaries({}, optional={"include_usage": FLAGS, "continuous_usage_stats": FLAGS}),
    "spaceport": some.fixed_dictionaries(
        {},
        optional={
            **{
                name: some.integers(0, 9) for name in ("mask_slots", "draft_rows", "lookup", "max_threads", "max_depth")
            },
            **dict.fromkeys(("fork", "threads", "trace"), FLAGS),
        },
    ),
    **dict.fromkeys(
        (
            *("stream", "echo", "ignore_eos", "skip_special_tokens", "return_token_ids", "disable_spec_decode"),
            *("add_generation_prompt", "continue_final_message", "include_stop_str_in_output", "parallel_tool_calls"),
        ),
        FLAGS,
    ),
}
SENSIBLE = some.lists(some.sampled_from([*TYPED]), max_size=6, unique=True).flatmap(
    lambda names: some.fixed_dictionaries({name: TYPED[name] for name in names})
)
FIELDS = SENSIBLE | some.dictionaries(
    some.sampled_from([*SUPPORTED, *IGNORED, *REFUSED, "other"]), VALUES | OBJECTS, min_size=1, max_size=3
)


def _spoilt(raw: bytes, at: int, kind: str) -> bytes:
    """A body that is damaged at an index."""
    index = at % (len(raw) + 1)
    damage = {
        "cut": raw[:index],
        "byte": raw[:index] + b"\xff\xc0" + raw[index + 1 :],
        "zero": raw[:index] + b"\x00" + raw[index:],
        "twice": raw + raw,
        "nested": b"[" * (at % 200_000) + raw,
        "number": raw.replace(b"3", b"9" * (at % 20_000 + 1), 1),
        "exponent": raw.replace(b"3", b"1e" + b"9" * (at % 50 + 1), 1),
        "bom": b"\xef\xbb\xbf" + raw,
        "wide": raw.decode("ascii").encode("utf-16"),
    }
    return damage[kind]


def _encoded(path: str, fields: dict[str, Any]) -> tuple[str, bytes]:
    return path, json.dumps({**BASES[path], **fields}).encode()


RIGHT = some.builds(_encoded, some.sampled_from([*BASES]), FIELDS)
DAMAGED = some.builds(
    lambda one, at, kind: (one[0], _spoilt(one[1], at, kind)),
    RIGHT,
    some.integers(0, 10**6),
    some.sampled_from(["cut", "byte", "zero", "twice", "nested", "number", "exponent", "bom", "wide"]),
)
ANY = some.one_of(RIGHT, RIGHT, RIGHT, DAMAGED, some.tuples(some.sampled_from([*BASES]), some.binary(max_size=60)))


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    limits = Limits(prompt_chars=4000, queued_prompt_tokens=20_000)
    opener = partial(chat_runtime, max_seq_len=128, limits=limits)
    options = ServiceOptions(most_bytes=300_000, request_timeout=5.0)
    with TestClient(application({"demo": opener}, options), raise_server_exceptions=False) as found:
        yield found


def check(client: TestClient, path: str, raw: bytes) -> None:
    """Send a body: it is answered, or refused with a reason that is not the service's own fault."""
    response = client.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404, 413, 503), (response.status_code, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert len(error["message"]) < 2000, error["message"][:300]
        assert error.keys() == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert "server_error" not in response.text
    else:
        response.json()


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def survives(client: TestClient, send: Callable[[], None]) -> None:
    """Afterwards the service has no request left, generates the same as before, and has not grown."""
    ask = {"prompt": "import json\n", "max_tokens": 20, "temperature": 0}
    before, memory = client.post("/v1/completions", json=ask).json()["choices"], resident()
    send()
    assert client.get("/load").json()["server_load"] == 0
    assert client.get("/health").status_code == 200
    assert client.post("/v1/completions", json=ask).json()["choices"] == before
    assert resident() - memory < MOST_GROWTH


def test_each_endpoint_that_takes_a_body_is_tried() -> None:
    assert BASES.keys() == BODIES.keys()


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
@pytest.mark.parametrize("examples", [150, pytest.param(1500, marks=pytest.mark.nightly)])
def test_hostile_bodies_are_answered_or_refused(client: TestClient, examples: int) -> None:
    survives(client, settings(max_examples=examples)(given(ANY)(lambda body: check(client, *body))))
