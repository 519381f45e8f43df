"""Metrics: what answers and the metrics page report agrees with what was generated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.serving.answers import metrics_of
from spaceport.serving.application import application
from spaceport.serving.metrics import Metrics
from spaceport.serving.options import ServiceOptions
from support.chat_runtime import chat_runtime


@pytest.fixture
def client() -> Iterator[TestClient]:
    opener = partial(chat_runtime, prefix_cache=False)
    with TestClient(application({"demo": opener}, ServiceOptions(metrics_prefix="vllm"))) as found:
        yield found


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    given = {"prompt": "import json\n\n\ndef load(path):\n", "temperature": 0, "max_tokens": 24, **fields}
    response = client.post("/v1/completions", json=given)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def page(client: TestClient) -> list[Any]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return [each for family in families for each in family.samples]


def counted(client: TestClient) -> dict[str, float]:
    """The values of the metrics page by name and label, without the model."""
    return {
        "/".join(
            (each.name.removeprefix("vllm:"), *(v for k, v in each.labels.items() if k != "model_name"))
        ): each.value
        for each in page(client)
    }


def test_rows_and_drafts_are_counted_and_reported_step_by_step_for_one_choice(client: TestClient) -> None:
    drafts = ask(client)["metrics"]["speculative_decoding"]
    found = counted(client)
    assert found["rows_total/candidate"] == drafts["num_draft_tokens"] > 0
    assert found["rows_total/mask"] > 0
    assert found["rows_total/known"] > 0
    assert found["rows_total/padding"] == 0
    accepted, drafted = drafts["per_step_accepted"], drafts["per_step_drafted"]
    assert len(accepted) == len(drafted) == drafts["num_spec_steps"] == sum(drafts["acceptance_histogram"])
    assert (sum(accepted), sum(drafted)) == (drafts["num_accepted_draft_tokens"], drafts["num_draft_tokens"])
    assert drafts["acceptance_histogram"] == [accepted.count(number) for number in range(max(accepted) + 1)]
    first = found["spec_decode_num_accepted_tokens_per_pos_total/0"]
    assert 0 < first <= found["spec_decode_num_accepted_tokens_total"] == sum(accepted)
    assert "per_step_accepted" not in ask(client, n=3, temperature=1, seed=3)["metrics"]["speculative_decoding"]
    assert counted(client)["rows_total/padding"] > 0


def test_steps_with_limited_drafts_are_counted_by_reason() -> None:
    metrics = Metrics("spaceport", dict)
    for _ in range(2):
        metrics.ended("demo", "stop", Statistics(drafts_limited={"budget": 3}))
    assert 'drafts_limited_total{model_name="demo",reason="budget"} 6.0' in metrics.text().decode()


def test_more_steps_than_are_counted_one_by_one_are_left_out() -> None:
    found = Statistics(steps=3, drafted_by_step=[2, 2], accepted_by_step=[1, 0], accepted_by_depth=[2, 1])
    drafts = metrics_of([found])["speculative_decoding"]
    assert "per_step_accepted" not in drafts
    assert drafts["acceptance_histogram"] == [1, 1, 1]


def test_a_prompt_counts_once_and_echoes_count_too(client: TestClient) -> None:
    usage = ask(client, n=3)["usage"]
    found = counted(client)
    assert found["prompt_tokens_total"] == usage["prompt_tokens"]
    assert found["generation_tokens_total"] == usage["completion_tokens"]
    for number, more in enumerate(({"max_tokens": 0}, {"max_tokens": 1}, {"max_tokens": 5}, {"logprobs": None}), 1):
        echo = ask(client, **{"echo": True, "logprobs": 1, "n": 2, **more})
        after = counted(client)
        assert after["prompt_tokens_total"] == (number + 1) * usage["prompt_tokens"]
        written = after["generation_tokens_total"] - found["generation_tokens_total"]
        assert written == echo["usage"]["completion_tokens"]
        assert echo["usage"]["prompt_tokens"] == usage["prompt_tokens"]
        assert echo["metrics"]["generation_time_ms"] > 0 or more == {"logprobs": None}
        found = after
    assert found["request_success_total/length"] >= 6


def test_samples_are_the_values_of_the_metrics_page(client: TestClient) -> None:
    ask(client, n=2)
    values = {(one.name, frozenset(one.labels.items())): one.value for one in page(client)}
    app: Any = client.app
    texts, samples = zip(*app.state.service.metrics.samples(), strict=True)
    found = {(one.name, frozenset(one.labels.items())): one.value for one in samples}
    other = [key[0] for key in found if found[key] != values[key]]
    assert other in ([], ["vllm:tokens_per_second"])  # of the last seconds
    assert len(samples) == len(found) > 100
    assert all(texts)
    assert not any(one.name.endswith("_created") for one in samples)
    shown = counted(client)
    assert [shown[name] for name in ("slots/used", "slots/cached", "threads/live", "num_requests_running")] == [0] * 4
    assert min(shown[name] for name in ("slots/free", "process_resident_memory_bytes")) > 1000
