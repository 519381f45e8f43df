"""The measuring tools: they measure what they say, whatever comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.tools.bench import load, outside

Capture = pytest.CaptureFixture[str]


def test_load_tells_throughput_and_latency_for_each_number_of_places(demo_bundle: Path, capsys: Capture) -> None:
    asked = ["--requests", "3", "--places", "1,2", "--context", "8", "--tokens", "6", "--rounds", "1", "--json"]
    load.command.main([str(demo_bundle), *asked], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert [one["places"] for one in told["loads"]] == [1, 2]
    assert told["loads"][0]["ratio"] == 1.0
    for one in told["loads"]:
        assert 0 < one["first_p50"] <= one["whole_p50"] <= one["whole_p95"]
        assert one["tokens_per_second"] > 0


def test_load_asks_the_prompts_of_a_checkpoint_in_turn() -> None:
    orders = load.given_orders(["a", "b"], 3, Decoding(max_tokens=5))
    assert [order.prompt for order in orders] == ["a", "b", "a"]
    lengths = [len(order.prompt) for order in load.random_orders(50, 10, Decoding())]
    assert min(lengths) >= 5
    assert max(lengths) <= 15
    assert len(set(lengths)) > 3


@pytest.mark.parametrize("places", ["", "a", "0", "1,0"])
def test_load_needs_places(demo_bundle: Path, places: str) -> None:
    with pytest.raises(OptionFault, match="expected numbers of at least 1"):
        load.command.main([str(demo_bundle), "--places", places], standalone_mode=False)


@pytest.mark.parametrize("real", [[], ["--real"]])
def test_rounds_outside_the_engine_are_of_the_widths_that_are_told(
    demo_bundle: Path, capsys: Capture, real: list[str]
) -> None:
    outside.command.main([str(demo_bundle), "--rounds", "10", "--json", *real], standalone_mode=False)
    costs = json.loads(capsys.readouterr().out)["costs"]
    assert [cost["requests"] for cost in costs] == [1, 1, 1, 8, 8]
    for cost, most in zip(costs, (1, 9, 36, 1, 9), strict=True):
        assert most * 0.8 < cost["rows"] <= most
    assert all(0 < cost["milliseconds"] <= cost["slow_milliseconds"] for cost in costs)
