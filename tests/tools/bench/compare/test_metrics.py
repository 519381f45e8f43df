"""Metrics: every runtime gets the same prompts, and values are ms per step or tokens/s."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.bench.compare.metrics import Metric, Workload, arguments, metrics_of, value_of

WORKLOAD = Workload(context=40, tokens=5, rows=(1, 9), prefill=60, requests=3, request_context=6, request_tokens=7)


def test_the_metrics_are_decode_steps_of_each_width_prefill_and_requests() -> None:
    found = [(metric.name, metric.unit) for metric in metrics_of(WORKLOAD)]
    assert found == [
        *(("decode", "ms"), ("1 row", "ms"), ("9 rows", "ms")),
        *(("prefill", "tokens/s"), ("3 requests", "tokens/s")),
    ]


def test_prompts_are_the_same_for_every_runtime_and_differ_by_round_and_metric() -> None:
    prompts = []
    for round_ in range(-1, 3):
        for metric in metrics_of(WORKLOAD):
            call = arguments(metric, WORKLOAD, round_)
            assert call == arguments(metric, WORKLOAD, round_)
            assert json.loads(json.dumps(call)) == call
            prompts += call.get("prompts", [call.get("prompt")])
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    assert all(3 <= token < 200 for prompt in prompts for token in prompt)


def test_lengths_are_those_of_the_workload() -> None:
    decode, _, rows, prefill, requests = (arguments(metric, WORKLOAD, 0) for metric in metrics_of(WORKLOAD))
    assert (len(decode["prompt"]), decode["tokens"]) == (40, 5)
    assert (len(rows["prompt"]), len(rows["rows"]), rows["repeats"]) == (40, 9, 3)
    assert len(prefill["prompt"]) == 60
    assert ([len(prompt) for prompt in requests["prompts"]], requests["tokens"]) == ([6, 6, 6], 7)
    assert WORKLOAD.length == 61


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [
        (Metric("decode", "decode", "ms"), [0.5, 0.001, 0.002], 2.0),
        (Metric("4 rows", "rows", "ms", 4), [0.004], 4.0),
        (Metric("prefill", "prefill", "tokens/s", 100), 0.5, 200.0),
        (Metric("8 requests", "requests", "tokens/s"), [30, 2.0], 15.0),
    ],
)
def test_a_value_is_a_median_step_time_or_a_rate(metric: Metric, value: Any, expected: float) -> None:
    assert value_of(metric, value) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"requests": 0}, "too small"), ({"tokens": 1}, "2 of --tokens"), ({"context": 36}, "longer --context")],
)
def test_workloads_that_cannot_be_measured_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionFault, match=message):
        Workload(**options)
