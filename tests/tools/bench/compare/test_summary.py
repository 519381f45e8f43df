"""Summary: prompts and units of metrics, medians and ratios over the rounds, tables, JSON and picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.bench.compare.machine import this_machine
from spaceport.tools.bench.compare.markdown import markdown_of, number
from spaceport.tools.bench.compare.metrics import Metric, Workload, arguments, metrics_of, value_of
from spaceport.tools.bench.compare.subjects import Skipped
from spaceport.tools.bench.compare.summary import Comparison, Spread, as_json, paired, spread, summarized
from spaceport.tools.bench.compare.worker_pool import Measurement, Record
from support.fake_subjects import WORKLOAD, fake_subject

OPENED = {"versions": {"fake": "1.2", "numpy": "2"}, "import_seconds": 0.5, "open_seconds": 1.25}


def measurements(*values: float) -> dict[int, Measurement]:
    return {number: Measurement(value, 1.0, 0.25) for number, value in enumerate(values)}


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """A bundle, a slower peer without steps of several rows, and a skipped peer."""
    ours = Record(fake_subject("spaceport int8", tmp_path, is_bundle=True), OPENED, 2_000_000, 3_000_000)
    ours.measurements = {
        "decode": measurements(10, 20, 12),
        "4 rows": measurements(11, 11, 11),
        "2 requests": measurements(100, 100, 50),
    }
    ours.skipped = {"prefill": "its process ended"}
    peer = Record(fake_subject("peer <int4>", tmp_path), OPENED, 9_000_000, 9_000_000)
    peer.measurements = {"decode": measurements(15, 20, 24), "2 requests": measurements(50, 200, 50)}
    peer.skipped = {"1 row": "it cannot", "4 rows": "it cannot"}
    records = {record.subject.name: record for record in (ours, peer)}
    return Comparison(
        *("c110", this_machine(), 2, 3, WORKLOAD),
        metrics_of(WORKLOAD),
        summarized(records, metrics_of(WORKLOAD)),
        (Skipped("llama.cpp", "no GGUF file: add --gguf FILE"),),
        repeated_measurements=1,
    )


def test_ratios_are_paired_by_round_and_above_one_is_slower() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)  # the median and the range
    assert paired("ms", measurements(15, 20, 24), measurements(10, 20, 12)) == Spread(1.5, 1.0, 2.0)
    assert paired("tokens/s", measurements(50, 200, 50), measurements(100, 100, 50)) == Spread(1.0, 0.5, 2.0)
    assert paired("ms", {1: Measurement(30, 1, 0)}, measurements(10, 20)) == Spread(1.5, 1.5, 1.5)
    assert paired("ms", {5: Measurement(30, 1, 0)}, measurements(10, 20)) is None


def test_json_has_every_value_and_null_for_skipped_metrics(comparison: Comparison) -> None:
    data = json.loads(json.dumps(as_json(comparison)))
    ours, peer = data["subjects"]
    assert (ours["file_bytes"], ours["results"]["prefill"], peer["results"]["4 rows"]) == (5, None, None)
    assert ours["skipped"] == {"prefill": "its process ended"}
    decode = peer["results"]["decode"]
    assert (decode["values"], decode["spread"]) == ([15, 20, 24], {"median": 20, "low": 15, "high": 24})
    assert decode["ratios"]["spaceport int8"] == {"median": 1.5, "low": 1, "high": 2}
    assert data["skipped"] == [{"name": "llama.cpp", "reason": "no GGUF file: add --gguf FILE"}]


def test_markdown_has_medians_ratios_resources_and_reasons(comparison: Comparison) -> None:
    lines = markdown_of(comparison).splitlines()
    assert "Checkpoint c110, 2 thread(s), 3 rounds" in lines[0]
    assert "| spaceport int8 | 12.0 | - | 11.0 | - | 100 |" in lines
    assert "| peer <int4> | 20.0 | - | - | - | 50.0 |" in lines
    assert "| peer <int4> | 1.50 (1.00-2.00) | - | - | - | 1.00 (0.50-2.00) |" in lines
    assert "| spaceport int8 | 2 | 3 | 0 | 0.50 | 1.25 | fake 1.2; fake |" in lines
    assert "- peer <int4>, 1 row, 4 rows: it cannot" in lines
    assert "- Other processes of the machine used 0.25 cores in the median measurement." in lines
    for value, text in ((1234.5, "1234"), (12.345, "12.3"), (1.2345, "1.23")):
        assert number(value) == text


def test_a_value_is_a_median_step_time_or_a_rate_and_workloads_have_a_least_size() -> None:
    for metric, value, expected in (
        (Metric("decode", "decode", "ms"), [0.5, 0.001, 0.002], 2.0),
        (Metric("4 rows", "rows", "ms", 4), [0.004], 4.0),
        (Metric("prefill", "prefill", "tokens/s", 100), 0.5, 200.0),
        (Metric("8 requests", "requests", "tokens/s"), [30, 2.0], 15.0),
    ):
        assert value_of(metric, value) == pytest.approx(expected)
    for options, message in (({"requests": 0}, "too small"), ({"tokens": 1}, "2 of"), ({"context": 36}, "longer")):
        with pytest.raises(OptionFault, match=message):
            Workload(**options)  # type: ignore[arg-type]


def test_prompts_have_the_lengths_of_the_workload_and_differ_by_round_and_metric() -> None:
    lengths = {"context": 40, "tokens": 5, "rows": (1, 9), "prefill": 60, "requests": 3}
    workload = Workload(**lengths, request_context=6, request_tokens=7)  # type: ignore[arg-type]
    metrics = metrics_of(workload)
    units = {"decode": "ms", "1 row": "ms", "9 rows": "ms", "prefill": "tokens/s", "3 requests": "tokens/s"}
    assert {metric.name: metric.unit for metric in metrics} == units
    calls = [arguments(metric, workload, round_) for round_ in range(-1, 3) for metric in metrics]
    assert calls == [arguments(metric, workload, round_) for round_ in range(-1, 3) for metric in metrics]
    assert json.loads(json.dumps(calls)) == calls
    prompts = [tuple(prompt) for call in calls for prompt in call.get("prompts", [call.get("prompt")])]
    assert len(set(prompts)) == len(prompts)
    assert all(3 <= token < 200 for prompt in prompts for token in prompt)
    decode, _, rows, prefill, requests = (arguments(metric, workload, 0) for metric in metrics)
    assert (len(decode["prompt"]), decode["tokens"]) == (40, 5)
    assert (len(rows["prompt"]), len(rows["rows"]), rows["repeats"]) == (40, 9, 3)
    assert len(prefill["prompt"]) == 60
    assert ([len(prompt) for prompt in requests["prompts"]], requests["tokens"]) == ([6, 6, 6], 7)
    assert workload.length == 61
