"""Application: the answers, streams and errors of the service's endpoints, on a fake engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.logprobs import Logprobs, TokenLogprob
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.runtime.trace import TraceRecord
from spaceport.serving import answers
from spaceport.serving.application import application
from spaceport.serving.options import ServiceOptions
from support.chat_runtime import NO_DRAFTS, chat_runtime

PROMPT = "import json\n\n\ndef load(path):\n"
MESSAGES = [{"role": "user", "content": "Explain the parameters of move( source, target )"}]
CHAT: dict[str, Any] = {"messages": MESSAGES}
TEXT: dict[str, Any] = {"prompt": PROMPT}
both_kinds = pytest.mark.parametrize("given", [CHAT, TEXT], ids=["chat", "text"])


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(application({"demo": chat_runtime, "other": chat_runtime})) as found:
        yield found


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with chat_runtime(requests=1, prefix_cache=False) as found:
        yield found


def post(client: TestClient, **fields: Any) -> Any:
    given = {"model": "demo", "temperature": 0, "max_tokens": 24, **fields}
    given = {name: value for name, value in given.items() if value is not ...}
    return client.post("/v1/chat/completions" if "messages" in given else "/v1/completions", json=given)


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = post(client, **fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def events(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    response = post(client, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, last, end = response.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return [json.loads(one.removeprefix("data: ")) for one in found]


# Answers


@both_kinds
def test_an_answer_is_that_of_the_runtime_with_its_counts(
    client: TestClient, runtime: Runtime, given: dict[str, Any]
) -> None:
    expected = runtime.generate(given.get("messages", PROMPT), Decoding(max_tokens=24, fork=False))
    found = ask(client, **given)
    (choice,) = found["choices"]
    if "messages" in given:
        assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
        assert (found["object"], found["id"][:9]) == ("chat.completion", "chatcmpl-")
    else:
        assert choice["text"] == expected.text
        assert (found["object"], found["id"][:5]) == ("text_completion", "cmpl-")
    assert choice["finish_reason"] == {"end": "stop"}.get(expected.ending, "length")
    prompt, written = len(expected.prompt_tokens), expected.statistics.tokens
    cached = found["usage"].pop("prompt_tokens_details")["cached_tokens"]
    assert 0 <= cached < prompt
    assert found["usage"] == {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
    drafts = found["metrics"]["speculative_decoding"]
    assert 0 < drafts["num_accepted_draft_tokens"] < drafts["num_draft_tokens"]
    plain = ask(client, **given, spaceport=NO_DRAFTS)
    assert plain["choices"] == found["choices"]
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_choices_have_seeds_of_their_own_and_their_indices_also_in_a_stream(
    client: TestClient, runtime: Runtime
) -> None:
    given: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.9, "seed": 5, "n": 3}
    one, two = (ask(client, **given)["choices"] for _ in range(2))
    assert [choice["index"] for choice in one] == [0, 1, 2]
    texts = [choice["text"] for choice in one]
    assert texts == [choice["text"] for choice in two]
    assert len(set(texts)) == 3
    for seed, text in enumerate(texts, 5):
        sampling = Sampling(temperature=0.9, seed=seed)
        assert runtime.generate(PROMPT, Decoding(max_tokens=24, fork=False, sampling=sampling)).text == text
    other = "def close(self):\n"
    answers = [ask(client, prompt=prompt)["choices"][0]["text"] for prompt in (other, PROMPT)]
    assert [one["text"] for one in ask(client, prompt=[other, PROMPT])["choices"]] == answers
    streamed = ["", "", ""]
    for part in events(client, **given):
        for choice in part["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts


# Log probabilities


def test_log_probabilities_are_those_of_the_runtime(client: TestClient, runtime: Runtime) -> None:
    expected = runtime.generate(MESSAGES, Decoding(max_tokens=6, fork=False, logprobs=2)).logprobs
    found = ask(client, **CHAT, max_tokens=6, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert [bytes(one["bytes"]) for one in found] == [bytes(one.bytes) for one in expected]
    assert [len(one["top_logprobs"]) for one in found] == [2] * 6


@pytest.mark.parametrize(
    "more", [{"max_tokens": 1}, {"max_tokens": 1, "temperature": 0.0, "seed": 7}, {"max_tokens": 0}]
)
def test_an_echo_scores_the_prompt(client: TestClient, runtime: Runtime, more: dict[str, Any]) -> None:
    score = runtime.score(PROMPT, top=1)
    found = ask(client, prompt=list(score.tokens), echo=True, logprobs=1, **more)["choices"][0]
    scored = found["logprobs"]["token_logprobs"]
    assert scored[0] is None
    assert scored[1 : len(score.tokens)] == pytest.approx([one.logprob for one in score.logprobs], abs=1e-4)
    assert len(scored) == len(score.tokens) + more["max_tokens"]
    assert found["text"].startswith(f"<s>{PROMPT}")
    assert "".join(found["logprobs"]["tokens"]) == found["text"]
    if following := found["text"].removeprefix(f"<s>{PROMPT}"):  # which may be a stop string
        stopped = ask(client, prompt=PROMPT, echo=True, logprobs=1, **more, stop=following)["choices"][0]
        assert (stopped["text"], stopped["finish_reason"]) == (PROMPT, "stop")


@pytest.mark.parametrize("choices", [1, 2])
def test_a_stream_builds_each_log_probability_once(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, choices: int
) -> None:
    built, at = [], Logprobs.at

    def counted(logprobs: Logprobs, path: tuple[int, ...], index: int) -> TokenLogprob:
        built.append(at(logprobs, path, index))
        return built[-1]

    monkeypatch.setattr(Logprobs, "at", counted)
    streamed = [choice for part in events(client, **TEXT, n=choices, logprobs=2) for choice in part["choices"]]
    shown = [token for choice in streamed for token in (choice.get("logprobs") or {"tokens": ()})["tokens"]]
    assert 0 < len(shown) == len(built)


# Streams


@both_kinds
def test_a_stream_has_the_text_of_the_whole_answer(client: TestClient, given: dict[str, Any]) -> None:
    whole = ask(client, **given)
    found = events(client, **given, stream_options={"include_usage": True})
    *parts, last = found
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert "speculative_decoding" in last["metrics"]
    choices = [part["choices"][0] for part in parts]
    if "messages" in given:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        text = whole["choices"][0]["message"]["content"]
        assert "".join(one["delta"].get("content", "") for one in choices) == text
    else:
        assert "".join(one["text"] for one in choices) == whole["choices"][0]["text"]
    assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + ["length"]
    assert len({part["id"] for part in found}) == 1
    parts = events(client, **given, stream_options={"include_usage": True, "continuous_usage_stats": True})
    so_far = [part["usage"]["completion_tokens"] for part in parts if "usage" in part]
    assert 0 < so_far[0] < so_far[-1]


def test_a_stream_can_have_the_text_of_each_thread_as_it_is_generated(client: TestClient) -> None:
    given: dict[str, Any] = {**CHAT, "max_tokens": 150}
    forked = {"fork": True, "threads": True}
    whole = ask(client, **given, spaceport=forked)["choices"][0]
    assert "threads" not in ask(client, **given)["choices"][0]["spaceport"]
    threads: dict[tuple[int, ...], str] = {}
    reading, early = "", False
    for part in (part["choices"][0] for part in events(client, **given, spaceport=forked)):
        reading += part["delta"].get("content", "")
        for piece in part.get("spaceport", {}).get("pieces", ()):
            path = tuple(piece["path"])
            threads[path] = threads.get(path, "") + piece["text"]
        early |= len("".join(threads.values())) > len(reading)
    assert reading == whole["message"]["content"]
    assert len(threads) > 1
    expected = {tuple(one["path"]): one["text"] for one in whole["spaceport"]["threads"]}
    assert threads == {path: text for path, text in expected.items() if text}
    assert early  # text of later threads comes before its turn in reading order


def test_a_trace_has_the_rows_and_tokens_of_each_step_and_comes_with_the_events(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"prompt": PROMPT, "spaceport": {"trace": True}}
    whole = ask(client, **given)
    choice = whole["choices"][0]
    parts = [part["choices"][0] for part in events(client, **given)]
    assert "trace" not in ask(client, prompt=PROMPT)["choices"][0]["spaceport"]
    last = parts[-1]["spaceport"]["trace"]
    for trace in (choice["spaceport"]["trace"], last):
        record = msgspec.convert(trace, TraceRecord, str_keys=True)
        assert [(thread.path, thread.ending) for thread in record.threads] == [((), "length")]
        rows = [one for step in record.steps for one in step.rows]
        assert "".join(piece for one in rows for piece in one.pieces) == choice["text"]
        accepted = whole["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
        assert sum(one.accepted for one in rows) == accepted > 0
        assert sum(one.kinds.count("mask") for one in rows) > 0
    grown = [part["spaceport"] for part in parts[:-1] if "steps" in part.get("spaceport", {})]
    steps = [step for one in grown for step in one["steps"]]
    assert 0 < len(steps) <= len(last["steps"])
    for step, expected in zip(steps, last["steps"], strict=False):
        assert step | {"ended": []} == expected | {"ended": []}
    assert [thread["path"] for one in grown for thread in one["threads"]] == [[]]
    assert {name: text for one in grown for name, text in one["texts"].items()}.items() <= last["texts"].items()
    monkeypatch.setattr(answers, "MOST_STEPS", 3)
    plain = {"trace": True, "mask_slots": 0, "lookup": 0}
    long = ask(client, prompt=PROMPT, spaceport=plain)["choices"][0]["spaceport"]["trace"]
    assert (len(long["steps"]), long["steps_left_out"]) == (3, 21)


def test_a_json_object_may_have_a_schema_as_in_the_server_of_llama_cpp(client: TestClient) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    found = ask(client, **CHAT, response_format={"type": "json_object", "schema": schema})
    assert found["choices"][0]["message"]["content"].startswith(('{"a":true', '{"a":false'))


# Errors

ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"stream": True, "temperature": -1}, "temperature is -1"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": "many"}, "max_tokens: Expected `int"),
    ({"response_format": {"type": "text", "schema": {}}, "messages": MESSAGES}, "has a schema with the type text"),
    ({"response_format": {"type": "json"}, "messages": MESSAGES}, "'json': expected one of text, json_object, json_sc"),
    ({"spaceport": {"draft": "list"}}, "spaceport.draft: Invalid enum value 'list': expected one of chain, tree"),
    (
        {"response_format": {"type": "json_schema"}, "messages": MESSAGES},
        'no json_schema: expected {"type": "json_schem',
    ),
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": ["a", 3]}, "prompt mixes texts and token ids"),
    ({"suffix": "end"}, "not trained to fill a gap"),  # the tokenizer has no tokens for one
    ({"prompt": [3], "suffix": "end"}, "suffix with token ids as prompt"),
    ({"echo": True, "stream": True}, "echo with stream"),
    ({"echo": True, "suffix": "end"}, "echo with suffix"),
    ({"spaceport": {"regex": "a", "json_schema": {}}}, "regex, json_schema and lark: several of them are given"),
    (
        {"spaceport": {"regex": "a"}, "messages": MESSAGES, "response_format": {"type": "json_object"}},
        "several grammars",
    ),
    ({"guided_json": {}}, "unknown fields: guided_json; leave them out"),
    ({"functions": []}, "unknown fields: functions; leave them out"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "the models read text only"),
    ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs without logprobs"),
    ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice is 'required' without tools"),
    ({"model": "nothing"}, "the model 'nothing' does not exist: expected 'demo', 'other'"),
    ({"model": ...}, "no model is given"),
]


def test_an_invalid_request_gets_the_reason(client: TestClient) -> None:
    for fields, message in ERRORS:
        response = post(client, **(fields if "messages" in fields else {"prompt": PROMPT, **fields}))
        assert response.status_code == (404 if "model" in fields else 400), response.text
        error = response.json()["error"]
        assert message in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
    assert client.get("/v1/nothing").json()["error"]["message"] == "GET /v1/nothing: no such endpoint"
    missing = client.post("/chat/completions", json=CHAT).json()["error"]["message"]
    assert missing == "POST /chat/completions: no such endpoint, expected /v1/chat/completions"
    response = client.get("/v1/completions")
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["message"] == "GET /v1/completions: expected POST"


def test_a_body_that_is_no_json_too_large_or_has_unknown_fields_is_refused(client: TestClient) -> None:
    response = client.post("/v1/completions", content=b"{")
    assert (response.status_code, "the body is not JSON" in response.text) == (400, True)
    with TestClient(application({"demo": chat_runtime}, ServiceOptions(most_bytes=200))) as small:
        for size, status in ((201, 413), (200, 400)):
            assert small.post("/v1/completions", content=b"x" * size).status_code == status
    nested = {"spaceport": {"max_depht": 1}, "stream_options": {"usage": True}}
    response = post(client, prompt="a", unknown=1, **nested)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "spaceport.max_depht")
    assert "unknown fields: spaceport.max_depht, stream_options.usage, unknown; leave them out" in response.text
    assert ask(client, prompt="a", unknown=None, store=True, user="a", cache_prompt=True, max_tokens=1)


def test_a_full_queue_and_a_stopping_service_ask_clients_to_retry() -> None:
    app = application({"demo": lambda: chat_runtime(requests=1, delay=0.002, queue_limit=0)})
    with TestClient(app) as small:
        response = small.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 500})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert 'admission_rejections_total{reason="queue_full"} 1.0' in small.get("/metrics").text
        assert not app.state.service.completions
        while small.get("/load").json()["server_load"]:  # the cancelled one ends after its step
            pass
        assert ask(small, prompt="a", max_tokens=1)
        app.state.service.draining = True
        assert small.get("/health").status_code == 503
        assert small.get("/health/live").status_code == 200
        response = post(small, prompt="a")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["message"].startswith("the service is stopping")
        assert 'admission_rejections_total{reason="unavailable"}' not in small.get("/metrics").text
        assert 'admission_rejections_total{reason="stopping"} 1.0' in small.get("/metrics").text


# Information


def test_models_health_and_load_are_reported(client: TestClient, runtime: Runtime) -> None:
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["demo", "other"]
    demo = client.get("/v1/models/demo").json()
    assert (demo["max_model_len"], demo["root"]) == (1024, "Demo")
    assert demo["spaceport"] == {"mask_slots": 5, "heads": 0, "fork": True}
    assert client.get("/v1/models/nothing").status_code == 404
    for path in ("/health", "/health/live", "/health/ready"):
        assert client.get(path).status_code == 200, path
    load = client.get("/load").json()
    demo = load["models"]["demo"]
    assert (load["server_load"], demo["running"], demo["waiting"]) == (0, 0, 0)
    assert (demo["most_running"], demo["most_waiting"]) == (4, 256)
    assert 0 == demo["kv_slots_used"] <= demo["cached_tokens"] <= demo["kv_slots"]
    exactness = client.get("/version").json()["exactness"]
    assert exactness == dict.fromkeys(("demo", "other"), str(runtime.exactness))


def test_text_becomes_tokens_and_tokens_text(client: TestClient, runtime: Runtime) -> None:
    def post(path: str, **fields: Any) -> Any:
        return client.post(path, json={"model": "demo", **fields})

    tokens = post("/tokenize", prompt=PROMPT).json()["tokens"]
    assert tokens == runtime.tokens_of(PROMPT)
    assert post("/detokenize", tokens=tokens).json() == {"prompt": f"<s>{PROMPT}"}
    size = runtime.bundle.manifest.signature.vocab_size
    for wrong in ([-1], [size]):
        assert post("/detokenize", tokens=wrong).status_code == 400
    for given in ({}, {"prompt": "a", "messages": MESSAGES}):
        assert post("/tokenize", **given).status_code == 400
    info = client.get("/tokenizer_info", params={"model": "demo"}).json()
    assert (info["bos_token"], "messages" in info["chat_template"]) == ("<s>", True)
    alone = post("/tokenize", prompt=PROMPT, add_special_tokens=False).json()["tokens"]
    assert [runtime.tokenizer.token_to_id("<s>"), *alone] == tokens
