"""Infill: requests as plug-ins for llama.cpp's server send them, on a fake engine, and where their texts end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tokenizers import AddedToken, Tokenizer

from spaceport.graphs.contract.manifest import TOKENIZER_FILE
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.text.infill import InfillPrompt
from spaceport.serving.application import application
from spaceport.serving.infill import GapText
from spaceport.serving.options import ServiceOptions
from support.chat_runtime import chat_runtime, wait_until
from support.paths import DEMO

MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<repo_name>")
GAP: dict[str, Any] = {
    "input_prefix": "import json\n\n",
    "input_suffix": "\n\nload()\n",
    "prompt": "def load(",
    "n_predict": 12,
}
# What llama.vscode and llama.vim send beside the gap.
PLUGIN: dict[str, Any] = {
    "id_slot": 0,
    "input_extra": [{"text": "def dump(path):\n    pass\n", "time": 5, "filename": "dump.py"}],
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 60_000,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coder")
    tokenizer = Tokenizer.from_file(str(DEMO / TOKENIZER_FILE))
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / TOKENIZER_FILE))
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(application({"coder": lambda: chat_runtime(folder)})) as found:
        yield found


def fill(client: TestClient, **fields: Any) -> Any:
    response = client.post("/infill", json={**GAP, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_plug_in_gets_the_most_probable_text_of_the_gap_with_its_counts(client: TestClient, folder: Path) -> None:
    files = (("dump.py", "def dump(path):\n    pass\n"),)
    with chat_runtime(folder) as runtime:
        prompt = InfillPrompt("import json\n\ndef load(", "\n\nload()\n", files)
        expected = runtime.generate(prompt, Decoding(max_tokens=12, fork=False))
    found = fill(client, **PLUGIN)
    assert (found["content"], found["model"], found["stop"]) == (expected.text, "coder", True)
    assert found["tokens_evaluated"] == len(expected.prompt_tokens)
    assert found["tokens_predicted"] == expected.statistics.tokens
    timings = found["timings"]
    assert timings["predicted_n"] == expected.statistics.tokens
    assert timings["prompt_n"] + timings["cache_n"] == len(expected.prompt_tokens)
    assert found["generation_settings"]["n_ctx"] == 1024


def test_several_choices_begin_with_the_most_probable_one(client: TestClient) -> None:
    found = fill(client, **PLUGIN, n_cmpl=3, seed=1)
    assert [choice["index"] for choice in found] == [0, 1, 2]
    assert found[0]["content"] == fill(client, **PLUGIN)["content"]
    assert len({choice["content"] for choice in found}) == 3


def test_a_request_may_only_read_the_prompt_and_name_what_it_wants(client: TestClient) -> None:
    names = ["content", "timings/prompt_n", "truncated", "timings", ""]
    found = fill(client, n_predict=0, samplers=[], repetition_penalty=1, response_fields=names)
    assert found.keys() == {*names} - {""}
    assert (found["content"], found["timings/prompt_n"]) == ("", found["timings"]["prompt_n"])
    assert fill(client, input_prefix="", input_suffix="", prompt="", response_fields=[""]) == {}
    assert fill(client)["timings"]["cache_n"] > 0


def test_an_invalid_request_gets_the_reason(client: TestClient) -> None:
    for fields, message in (
        ({"input_suffix": None}, "input_suffix"),
        ({"samplers": ["top_p", "top_k"]}, "samplers names top_p, top_k: expected top_k, top_p, which run"),
        ({"samplers": ["dry", "infill"]}, "samplers names dry: expected none"),
        ({"samplers": [], "temperature": 0.5}, "samplers names none: expected temperature"),
        ({"samplers": ["top_k"], "frequency_penalty": 0.5}, "samplers names top_k: expected penalties, top_k"),
        ({"n_predict": -2}, "n_predict is -2: expected at least -1"),
        ({"n_indent": -1}, "n_indent is -1"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra"),
        ({"input_extra": [{"text": "a"}] * 5000}, "input_extra has 5000 entries"),
        ({"lora": []}, "unknown fields: lora"),
    ):
        response = client.post("/infill", json={**GAP, **fields})
        assert (response.status_code, message in response.text) == (400, True), response.text
    with TestClient(application({"demo": chat_runtime})) as other:
        response = other.post("/infill", json=GAP)
        assert (response.status_code, "not trained to fill a gap" in response.text) == (400, True)


@pytest.mark.parametrize(
    ("text", "indent", "expected", "ending"),
    [
        ("x\ny\n", 0, "x\ny\n", None),
        ("x\n    y\n  z", 4, "x\n    y", "stop"),
        ("x\n    y\n  ", 4, "x\n    y\n  ", None),  # more indentation may follow
        ("x\n\ty\n\tz\n", 1, "x\n\ty\n\tz\n", None),
        ("  x\n\n    y", 4, "  x", "stop"),  # an empty line ends the block, as in llama.cpp
        ("\ny", 1, "", "stop"),
    ],
)
def test_a_gap_ends_before_a_line_with_less_indentation(
    text: str, indent: int, expected: str, ending: str | None
) -> None:
    for size in (1, 2, len(text)):
        gap, settled = GapText(indent), ""
        for start in range(0, len(text), size):
            if gap.ending is None:
                gap.add(text[start : start + size])
                assert gap.settled.startswith(settled)
                settled = gap.settled
        assert (gap.text, gap.ending) == (expected, ending)
        assert gap.text.startswith(settled)


def test_a_gap_ends_with_a_line_after_its_time() -> None:
    for seconds, expected in ((math.inf, "x\ny\nz"), (0.0, "x")):
        gap = GapText(seconds=seconds)
        gap.add("x\ny\nz")
        assert (gap.text, gap.settled) == (expected, expected)


def streamed(client: TestClient, **fields: Any) -> list[Any]:
    """The events of a stream."""
    response = client.post("/infill", json={**GAP, **fields, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]


SHORT, LONG = ({"spaceport": {"regex": regex}} for regex in (r"a\n  b\n", r"a\n  b\n(c ){300}"))


@pytest.mark.parametrize(
    ("fields", "expected", "kind"),
    [
        (SHORT, "a\n  b\n", "eos"),
        ({**SHORT, "stop": ["b"]}, "a\n  ", "word"),
        ({**LONG, "n_indent": 4}, "a", "limit"),
        ({**LONG, "n_indent": 2}, "a\n  b", "limit"),
        ({**LONG, "t_max_predict_ms": 1e-6}, "a", "limit"),
        ({"n_predict": 0}, "", "limit"),
        (PLUGIN, None, None),
        ({"n_cmpl": 3, "seed": 1}, None, None),
    ],
)
def test_the_text_ends_where_the_request_says_whole_or_as_a_stream(
    client: TestClient, fields: dict[str, Any], expected: str | None, kind: str | None
) -> None:
    asked = {"n_predict": 400 if "spaceport" in fields else 40, **fields}
    whole = fill(client, **asked)
    if expected is not None:
        assert (whole["content"], whole["stop_type"], whole["has_new_line"]) == (expected, kind, "\n" in expected)
        assert whole["tokens_predicted"] < 100  # nothing is decoded for long beyond its end
    *events, last = streamed(client, **asked)
    for choice in whole if isinstance(whole, list) else [whole]:
        index = choice["index"]
        own = [event for event in [*events, last] if event["index"] == index]
        assert [event["stop"] for event in own] == [False] * (len(own) - 1) + [True]
        assert "".join(event["content"] for event in own) == choice["content"]
        assert own[-1]["content"] == ""
        named = ("stop_type", "has_new_line", "tokens_evaluated")
        assert [own[-1][name] for name in named] == [choice[name] for name in named]
        if choice["content"]:
            assert len(own) > 2 or "spaceport" in fields
    assert streamed(client, **asked, response_fields=["stop"])[-1] == {"stop": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "ending"), [({"n_indent": 4}, "stop"), ({"t_max_predict_ms": 1e-6}, "time"), ({}, "end")]
)
def test_a_gap_that_ended_early_is_logged_so_and_audited_as_a_whole(
    folder: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], ending: str, stream: bool
) -> None:
    written = {"regex": r"a\n  b\n(c ){100}" if fields else "a b"}
    app = application({"coder": lambda: chat_runtime(folder)}, ServiceOptions(audit_rate=1.0))
    with TestClient(app) as client, caplog.at_level("INFO", "spaceport.service"):
        body = {**GAP, "n_predict": 400, "stream": stream, "spaceport": written, **fields}
        assert client.post("/infill", json=body).status_code == 200
        counted = 'exactness_{}_total{{model_name="coder"}} {}.0'
        wait_until(lambda: counted.format("checked", 1) in client.get("/metrics").text)
        assert counted.format("fault", 0) in client.get("/metrics").text
    (entry,) = [record.fields for record in caplog.records if getattr(record, "fields", {}).get("route") == "/infill"]
    assert entry["ending"] == ending
