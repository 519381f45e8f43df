"""Summary: medians and ranges over the rounds, ratios within a round, tables and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spaceport.tools.bench.compare.machine import this_machine
from spaceport.tools.bench.compare.markdown import markdown_of, number
from spaceport.tools.bench.compare.metrics import metrics_of
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


def test_a_spread_is_the_median_and_the_range() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_ratios_are_paired_by_round_and_above_one_is_slower() -> None:
    assert paired("ms", measurements(15, 20, 24), measurements(10, 20, 12)) == Spread(1.5, 1.0, 2.0)
    assert paired("tokens/s", measurements(50, 200, 50), measurements(100, 100, 50)) == Spread(1.0, 0.5, 2.0)
    assert paired("ms", {1: Measurement(30, 1, 0)}, measurements(10, 20)) == Spread(1.5, 1.5, 1.5)
    assert paired("ms", {5: Measurement(30, 1, 0)}, measurements(10, 20)) is None


def test_json_has_every_value_and_null_for_skipped_metrics(comparison: Comparison) -> None:
    data = json.loads(json.dumps(as_json(comparison)))
    ours, peer = data["subjects"]
    assert ours["file_bytes"] == 5
    assert ours["results"]["prefill"] is None
    assert ours["skipped"] == {"prefill": "its process ended"}
    assert peer["results"]["decode"]["values"] == [15, 20, 24]
    assert peer["results"]["decode"]["spread"] == {"median": 20, "low": 15, "high": 24}
    assert peer["results"]["decode"]["ratios"]["spaceport int8"] == {"median": 1.5, "low": 1, "high": 2}
    assert peer["results"]["4 rows"] is None
    assert data["metrics"] == ["decode", "1 row", "4 rows", "prefill", "2 requests"]
    assert data["skipped"] == [{"name": "llama.cpp", "reason": "no GGUF file: add --gguf FILE"}]
    assert data["machine"]["cores"] >= 1
    assert data["workload"]["context"] == 8


def test_markdown_has_medians_ratios_resources_and_reasons(comparison: Comparison) -> None:
    lines = markdown_of(comparison).splitlines()
    assert "Checkpoint c110, 2 thread(s), 3 rounds" in lines[0]
    assert "| spaceport int8 | 12.0 | - | 11.0 | - | 100 |" in lines
    assert "| peer <int4> | 20.0 | - | - | - | 50.0 |" in lines
    assert "| peer <int4> | 1.50 (1.00-2.00) | - | - | - | 1.00 (0.50-2.00) |" in lines
    assert "| spaceport int8 | 2 | 3 | 0 | 0.50 | 1.25 | fake 1.2; fake |" in lines
    assert "- llama.cpp: not measured: no GGUF file: add --gguf FILE" in lines
    assert "- peer <int4>, 1 row, 4 rows: it cannot" in lines
    assert "- spaceport int8, prefill: its process ended" in lines
    assert "- Other processes of the machine used 0.25 cores in the median measurement." in lines
    assert "- 1 measurements were repeated because another worker was computing meanwhile." in lines
    tables = [line for line in lines if line.startswith("|")]
    assert all(line.count("|") in (7, 9, 10, 8) for line in tables)


@pytest.mark.parametrize(("value", "text"), [(1234.5, "1234"), (12.345, "12.3"), (1.2345, "1.23")])
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert number(value) == text
