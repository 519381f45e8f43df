"""Application: the answers, streams and errors of the service's endpoints, with real bundles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.runtime.trace.reader import trace_of
from spaceport.tools.serve import traces
from spaceport.tools.serve.application import application
from spaceport.tools.serve.options import ServiceOptions
from support.paths import DEMO

pytestmark = pytest.mark.slow

PROMPT = "import json\n\n\ndef load(path):\n"
MESSAGES = [{"role": "user", "content": json.loads((DEMO / "prompts.json").read_text("utf-8"))["triangular"]["user"]}]


@pytest.fixture(scope="module")
def client(demo_bundle: Path) -> Iterator[TestClient]:
    opener = partial(Runtime.open, demo_bundle, max_requests=4, prefix_cache=True, step_costs="free")
    with TestClient(application({"demo": opener, "other": opener}, ServiceOptions())) as found:
        yield found


@pytest.fixture(scope="module")
def runtime(demo_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(demo_bundle) as found:
        yield found


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    given = {"model": "demo", "temperature": 0, "max_tokens": 24, **fields}
    response = client.post("/v1/chat/completions" if "messages" in given else "/v1/completions", json=given)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def refused(client: TestClient, status: int, **fields: Any) -> dict[str, Any]:
    given = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, **fields}
    given = {name: value for name, value in given.items() if value is not ...}
    response = client.post("/v1/chat/completions" if "messages" in given else "/v1/completions", json=given)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def events(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    given = {"model": "demo", "temperature": 0, "max_tokens": 24, "stream": True, **fields}
    response = client.post("/v1/chat/completions" if "messages" in given else "/v1/completions", json=given)
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, last, end = response.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return [json.loads(one.removeprefix("data: ")) for one in found]


# Answers


def test_an_answer_is_that_of_the_runtime(client: TestClient, runtime: Runtime) -> None:
    expected = runtime.generate(PROMPT, Decoding(max_tokens=24, fork=False))
    found = ask(client, prompt=PROMPT)
    (choice,) = found["choices"]
    assert choice["text"] == expected.text
    assert choice["finish_reason"] == {"end": "stop"}.get(expected.ending, "length")
    usage = found["usage"]
    assert usage["prompt_tokens"] == len(expected.prompt_tokens)
    assert usage["completion_tokens"] == expected.statistics.tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert found["object"] == "text_completion"
    assert found["id"].startswith("cmpl-")
    drafts = found["metrics"]["speculative_decoding"]
    assert sum(drafts["acceptance_histogram"]) == drafts["num_spec_steps"]
    assert drafts["num_accepted_draft_tokens"] == found["timings"]["draft_n_accepted"]


def test_messages_are_answered_through_the_chat_template(client: TestClient, runtime: Runtime) -> None:
    expected = runtime.generate(MESSAGES, Decoding(max_tokens=24, fork=False))
    found = ask(client, messages=MESSAGES)
    assert found["choices"][0]["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert found["object"] == "chat.completion"


def test_drafts_can_be_switched_off_and_change_nothing(client: TestClient) -> None:
    plain, drafted = (ask(client, prompt=PROMPT, disable_spec_decode=off) for off in (True, False))
    assert plain["choices"][0]["text"] == drafted["choices"][0]["text"]
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_plain_clients_get_no_forks_and_others_get_each_thread(client: TestClient) -> None:
    plain = ask(client, messages=MESSAGES, max_tokens=150)["choices"][0]
    forked = ask(client, messages=MESSAGES, max_tokens=150, spaceport={"fork": True})["choices"][0]
    assert "threads" not in plain["spaceport"]
    assert len(forked["spaceport"]["threads"]) > 1


def test_choices_have_seeds_of_their_own(client: TestClient) -> None:
    one, two = (ask(client, prompt=PROMPT, temperature=0.9, seed=5, n=3)["choices"] for _ in range(2))
    assert [choice["index"] for choice in one] == [0, 1, 2]
    texts = [choice["text"] for choice in one]
    assert texts == [choice["text"] for choice in two]
    assert len(set(texts)) > 1
    single = ask(client, prompt=PROMPT, temperature=0.9, seed=6)["choices"][0]
    assert single["text"] == texts[1]


def test_several_prompts_are_answered_in_their_order(client: TestClient, runtime: Runtime) -> None:
    prompts = [PROMPT, "def close(self):\n"]
    found = ask(client, prompt=prompts)
    expected = [runtime.generate(one, Decoding(max_tokens=24, fork=False)) for one in prompts]
    assert [one["text"] for one in found["choices"]] == [one.text for one in expected]
    assert found["usage"]["prompt_tokens"] == sum(len(one.prompt_tokens) for one in expected)


def test_the_end_of_an_answer_is_one_of_the_two_reasons(client: TestClient) -> None:
    assert ask(client, prompt=PROMPT, max_tokens=1)["choices"][0]["finish_reason"] == "length"
    whole = ask(client, prompt=PROMPT)["choices"][0]["text"]
    stopped = ask(client, prompt=PROMPT, stop=whole[6:9])["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert whole.startswith(stopped["text"])
    assert len(stopped["text"]) <= 6


def test_a_stop_string_can_be_part_of_the_answer(client: TestClient) -> None:
    whole = ask(client, prompt=PROMPT)["choices"][0]["text"]
    given = {"prompt": PROMPT, "stop": whole[6:9]}
    before = ask(client, **given)["choices"][0]["text"]
    after = ask(client, **given, include_stop_str_in_output=True)["choices"][0]["text"]
    assert after == before + whole[6:9]
    streamed = events(client, **given, include_stop_str_in_output=True)
    assert "".join(one["choices"][0]["text"] for one in streamed) == after


def test_json_answers_conform_to_their_schema(client: TestClient) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = ask(client, messages=MESSAGES, response_format=form)["choices"][0]["message"]["content"]
    assert json.loads(answer) in ({"n": 1}, {"n": 2})
    chosen = ask(client, messages=MESSAGES, structured_outputs={"choice": ["a+b", "c.d"]})
    assert chosen["choices"][0]["message"]["content"] in ("a+b", "c.d")


# Log probabilities


def test_log_probabilities_are_those_of_the_runtime(client: TestClient, runtime: Runtime) -> None:
    expected = runtime.generate(PROMPT, Decoding(max_tokens=6, fork=False, logprobs=2)).logprobs
    found = ask(client, prompt=PROMPT, max_tokens=6, logprobs=2)["choices"][0]["logprobs"]
    assert found["token_logprobs"] == pytest.approx([one.logprob for one in expected], abs=1e-4)
    assert [len(top) for top in found["top_logprobs"]] == [2] * 6
    chat = ask(client, messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]
    assert [len(one["top_logprobs"]) for one in chat["content"]] == [2] * 3


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


# Streams


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_stream_has_the_text_of_the_whole_answer(client: TestClient, kind: str) -> None:
    given: dict[str, Any] = {"messages": MESSAGES} if kind == "chat" else {"prompt": PROMPT}
    whole = ask(client, **given)["choices"][0]
    found = events(client, **given, stream_options={"include_usage": True})
    *parts, last = found
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert "speculative_decoding" in last["metrics"]
    choices = [part["choices"][0] for part in parts]
    if kind == "chat":
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["delta"].get("content", "") for one in choices) == whole["message"]["content"]
    else:
        assert "".join(one["text"] for one in choices) == whole["text"]
    assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + [whole["finish_reason"]]
    assert len({part["id"] for part in found}) == 1


def test_the_choices_of_a_stream_have_their_indices(client: TestClient) -> None:
    given: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.9, "seed": 5, "n": 3}
    whole = ask(client, **given)["choices"]
    texts = ["", "", ""]
    for part in events(client, **given):
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [one["text"] for one in whole]


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_token_ids_are_those_of_the_whole_answer(client: TestClient, kind: str) -> None:
    given: dict[str, Any] = {"messages": MESSAGES} if kind == "chat" else {"prompt": PROMPT}
    whole = ask(client, **given, return_token_ids=True)
    choice, usage = whole["choices"][0], whole["usage"]
    assert len(choice["token_ids"]) == usage["completion_tokens"]
    assert len(choice["prompt_token_ids"]) == usage["prompt_tokens"]
    parts = [part["choices"][0].get("token_ids", []) for part in events(client, **given, return_token_ids=True)]
    assert [token for part in parts for token in part] == choice["token_ids"]
    assert all(part["choices"][0].get("token_ids") is None for part in events(client, **given))


def test_an_echo_has_the_token_ids_of_its_prompt(client: TestClient) -> None:
    found = ask(client, prompt=PROMPT, echo=True, max_tokens=3, return_token_ids=True)["choices"][0]
    plain = ask(client, prompt=PROMPT, max_tokens=3, return_token_ids=True)["choices"][0]
    for name in ("prompt_token_ids", "token_ids"):
        assert found[name] == plain[name]
    scored = ask(client, prompt=PROMPT, echo=True, max_tokens=1, logprobs=1, return_token_ids=True)["choices"][0]
    assert scored["token_ids"] == plain["token_ids"][:1]
    assert "token_ids" not in ask(client, prompt=PROMPT, echo=True, max_tokens=1)["choices"][0]


def test_a_stream_can_have_the_text_of_each_thread_as_it_is_generated(client: TestClient) -> None:
    given: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 150}
    forked = {"fork": True, "threads": True}
    whole = ask(client, **given, spaceport=forked)["choices"][0]
    parts = [part["choices"][0] for part in events(client, **given, spaceport=forked)]
    threads: dict[tuple[int, ...], str] = {}
    reading = ""
    early = False
    for part in parts:
        reading += part["delta"].get("content", "")
        for piece in part.get("spaceport", {}).get("pieces", ()):
            path = tuple(piece["path"])
            threads[path] = threads.get(path, "") + piece["text"]
        early = early or len("".join(threads.values())) > len(reading)
    assert reading == whole["message"]["content"]
    assert len(threads) > 1
    assert [{"path": list(path), "text": text} for path, text in threads.items()] == [
        {"path": one["path"], "text": one["text"]} for one in whole["spaceport"]["threads"]
    ]
    assert early  # text of later threads comes before its turn in reading order
    plain = events(client, **given, spaceport={"fork": True})
    assert all("pieces" not in part["choices"][0].get("spaceport", {}) for part in plain)


def test_a_trace_has_the_rows_and_tokens_of_each_step(client: TestClient) -> None:
    given: dict[str, Any] = {"prompt": PROMPT, "spaceport": {"trace": True}}
    whole = ask(client, **given)
    choice = whole["choices"][0]
    last = [part["choices"][0] for part in events(client, **given)][-1]
    assert "trace" not in ask(client, prompt=PROMPT)["choices"][0]["spaceport"]
    for trace in (choice["spaceport"]["trace"], last["spaceport"]["trace"]):
        record = trace_of(trace)
        assert [(thread.path, thread.ending) for thread in record.threads] == [((), "length")]
        rows = [one for step in record.steps for one in step.rows]
        assert "".join(piece for one in rows for piece in one.pieces) == choice["text"]
        accepted = whole["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
        assert sum(one.accepted for one in rows) == accepted > 0
        assert sum(one.kinds.count("mask") for one in rows) > 0


def test_the_events_of_a_stream_have_the_steps_of_its_trace(client: TestClient) -> None:
    parts = [part["choices"][0] for part in events(client, prompt=PROMPT, spaceport={"trace": True})]
    grown = [part["spaceport"] for part in parts[:-1] if "steps" in part.get("spaceport", {})]
    whole = parts[-1]["spaceport"]["trace"]
    steps = [step for one in grown for step in one["steps"]]
    assert 0 < len(steps) <= len(whole["steps"])
    for step, expected in zip(steps, whole["steps"], strict=False):
        assert step | {"ended": []} == expected | {"ended": []}
    assert [thread["path"] for one in grown for thread in one["threads"]] == [[]]
    assert {name: text for one in grown for name, text in one["texts"].items()}.items() <= whole["texts"].items()


def test_a_long_trace_is_reported_without_its_last_steps(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MOST_STEPS", 3)
    trace = ask(client, prompt=PROMPT, spaceport={"trace": True, "mask_slots": 0, "lookup": 0})["choices"][0][
        "spaceport"
    ]["trace"]
    assert len(trace["steps"]) == 3
    assert trace["steps_left_out"] > 3


# Errors


@pytest.mark.parametrize(
    ("status", "fields", "message"),
    [
        (400, {"temperature": -1}, "temperature is -1"),
        (400, {"max_tokens": 0}, "max_tokens is 0"),
        (400, {"max_tokens": "many"}, "max_tokens: Expected `int"),
        (400, {"n": 99}, "n is 99: expected 1 to 16"),
        (400, {"prompt": []}, "prompt is empty"),
        (400, {"prompt": ["a", 3]}, "prompt mixes texts and token ids"),
        (400, {"prompt": "x" * 2_000_000}, "prompt_chars"),
        (400, {"logprobs": 21}, "logprobs"),
        (400, {"stop": ["x"] * 17}, "stop"),
        (400, {"logit_bias": {"a": 1}}, "logit_bias"),
        (400, {"suffix": "end"}, "suffix is not supported"),
        (400, {"echo": True, "stream": True}, "echo with stream"),
        (400, {"structured_outputs": {"grammar": "x"}}, "grammar is not supported"),
        (400, {"messages": []}, "messages is empty"),
        (400, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "the models read text only"),
        (400, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs without logprobs"),
        (400, {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice is 'required' without tools"),
        (404, {"model": "nothing"}, "the model 'nothing' does not exist: expected 'demo', 'other'"),
        (404, {"model": ...}, "no model is given"),
        (400, {"stream": True, "temperature": -1}, "temperature is -1"),
    ],
)
def test_an_invalid_request_gets_the_reason(
    client: TestClient, status: int, fields: dict[str, Any], message: str
) -> None:
    error = refused(client, status, **fields)
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_a_body_that_is_no_json_or_too_large_is_refused(
    client: TestClient, demo_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    response = client.post("/v1/completions", content=b"{")
    assert (response.status_code, "the body is not JSON" in response.text) == (400, True)
    opener = partial(Runtime.open, demo_bundle)
    with TestClient(application({"demo": opener}, ServiceOptions(most_bytes=200, strict=True))) as small:
        assert small.post("/v1/completions", content=b"x" * 201).status_code == 413
        response = small.post("/v1/completions", json={"prompt": "a", "unknown": 1, "max_tokens": 1})
        assert (response.status_code, "unknown fields: unknown" in response.text) == (400, True)
        nested = {
            "spaceport": {"max_depht": 1},
            "stream_options": {"usage": True},
            "structured_outputs": {"json": {"x": 1}},
        }
        response = small.post("/v1/completions", json={"prompt": "a", **nested, "max_tokens": 1})
        assert "unknown fields: spaceport.max_depht, stream_options.usage;" in response.text
    with caplog.at_level("DEBUG", "spaceport.service"):
        ask(client, prompt="a", unknown=1, spaceport={"depth": 1}, max_tokens=1)  # ignored unless strict
    assert "ignored fields: 'spaceport.depth', 'unknown'" in caplog.text


def test_unknown_paths_and_methods_are_reported_as_json(client: TestClient) -> None:
    assert client.get("/v1/nothing").json()["error"]["message"] == "GET /v1/nothing: no such endpoint"
    wrong = client.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_only_clients_with_a_key_are_answered(demo_bundle: Path) -> None:
    opener = partial(Runtime.open, demo_bundle)
    with TestClient(application({"demo": opener}, ServiceOptions(keys=("one", "two")))) as guarded:
        for path in ("/v1/models", "/metrics", "/load", "/healthy"):
            assert guarded.get(path).status_code == 401, path
            assert guarded.get(path, headers={"Authorization": "Bearer three"}).status_code == 401
        for key in ("one", "two"):
            assert guarded.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert guarded.get("/health").status_code == 200


def test_a_full_queue_asks_clients_to_retry(demo_bundle: Path) -> None:
    opener = partial(Runtime.open, demo_bundle, queue_limit=0)
    with TestClient(application({"demo": opener}, ServiceOptions())) as small:
        response = small.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 500})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert 'admission_rejections_total{reason="queue_full"} 1.0' in small.get("/metrics").text
        while small.get("/load").json()["server_load"]:  # the cancelled one ends after its step
            pass
        assert ask(small, prompt="a", max_tokens=1)


# Information


def test_models_health_and_load_are_reported(client: TestClient) -> None:
    models = client.get("/v1/models").json()["data"]
    assert [one["id"] for one in models] == ["demo", "other"]
    assert client.get("/v1/models/demo").json()["max_model_len"] > 100
    assert client.get("/v1/models/nothing").status_code == 404
    for path in ("/health", "/health/live", "/health/ready", "/v2/health/ready", "/v2/models/demo/ready"):
        assert client.get(path).status_code == 200, path
    load = client.get("/load").json()
    assert load["server_load"] == 0
    assert list(load["models"]) == ["demo", "other"]
    demo = load["models"]["demo"]
    assert (demo["running"], demo["waiting"], demo["most_running"], demo["most_waiting"]) == (0, 0, 4, 256)
    assert 0 == demo["kv_slots_used"] < demo["kv_slots"]
    assert 0 <= demo["cached_tokens"] <= demo["kv_slots"]
    version = client.get("/version").json()
    assert version["version"]
    assert set(version["exactness"]) == {"demo", "other"}
    assert version["exactness"]["demo"].startswith("equal up to near-ties (noise ")


def test_text_becomes_tokens_and_tokens_text(client: TestClient, runtime: Runtime) -> None:
    tokens = client.post("/tokenize", json={"model": "demo", "prompt": PROMPT}).json()["tokens"]
    assert tokens == runtime.tokens_of(PROMPT)
    assert client.post("/detokenize", json={"model": "demo", "tokens": tokens}).json() == {"prompt": f"<s>{PROMPT}"}
    assert client.post("/detokenize", json={"model": "demo", "tokens": [-1]}).status_code == 400
    assert client.post("/tokenize", json={"model": "demo"}).status_code == 400


def test_metrics_count_what_was_generated(demo_bundle: Path) -> None:
    opener = partial(Runtime.open, demo_bundle)
    options = ServiceOptions(metrics_prefix="vllm")
    with TestClient(application({"demo": opener}, options)) as counted:
        usage = ask(counted, prompt=PROMPT)["usage"]
        text = counted.get("/metrics").text
    assert f'vllm:generation_tokens_total{{model_name="demo"}} {float(usage["completion_tokens"])}' in text
    assert f'vllm:prompt_tokens_total{{model_name="demo"}} {float(usage["prompt_tokens"])}' in text
    assert 'vllm:num_requests_running{model_name="demo"} 0.0' in text
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="demo",position="0"}' in text


def test_a_stopping_service_refuses_new_requests(demo_bundle: Path) -> None:
    app = application({"demo": partial(Runtime.open, demo_bundle)}, ServiceOptions())
    with TestClient(app) as stopping:
        app.state.service.draining = True
        assert stopping.get("/health").status_code == 503
        assert stopping.get("/health/live").status_code == 200
        assert refused(stopping, 503)["message"].startswith("the service is stopping")
