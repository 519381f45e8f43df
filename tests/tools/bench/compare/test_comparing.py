"""Comparing: a tiny bundle and a fake runtime, from the command line to tables, JSON and plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.bench.compare.comparing import CompareOptions, compare
from spaceport.tools.bench.compare.markdown import markdown_of
from spaceport.tools.bench.compare.metrics import Workload
from spaceport.tools.bench.compare.subjects import Peer
from spaceport.tools.bench.compare.work_folder import WorkFolder
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, OK, USAGE
from support.fake_subjects import FAKE, installed
from support.paths import TINY

SMALL = "--context 12 --tokens 4 --rows 1,4 --prefill 16 --requests 2 --request-context 6 --request-tokens 5 --rounds 2"
WORKLOAD = Workload(12, 4, (1, 4), 3, 16, 2, 6, 5)


pytestmark = pytest.mark.on_change("tests/support/fake_runtime.py", "tools/bench/compare/adapters")  # starts processes


def test_the_command_measures_a_bundle_and_reports_skipped_runtimes(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "compare", str(TINY), "--work", str(tmp_path), "--bundle", str(tiny_bundle), *SMALL.split()]
    outputs = ["--json", "--plot", str(tmp_path / "plot.svg"), "--markdown", str(tmp_path / "page.md")]
    assert run([*command, *outputs]) == OK
    data = json.loads(capsys.readouterr().out)
    (ours,) = data["subjects"]
    assert ours["name"] == "spaceport float32"
    assert ours["skipped"] == {}
    assert set(ours["versions"]) == {"spaceport", "onnxruntime", "numpy"}
    for name in ("decode", "1 row", "4 rows", "prefill", "2 requests"):
        result = ours["results"][name]
        assert len(result["values"]) == 2
        assert 0 < result["spread"]["low"] <= result["spread"]["median"] <= result["spread"]["high"]
        assert result["ratios"] == {"spaceport float32": {"median": 1, "low": 1, "high": 1}}
    assert ours["resident_bytes_open"] > 10_000_000
    assert len(data["skipped"]) == 6
    assert all("add --" in skipped["reason"] for skipped in data["skipped"])
    assert (tmp_path / "plot.svg").read_text("utf-8").startswith("<svg")
    assert "| spaceport float32 |" in (tmp_path / "page.md").read_text("utf-8")


def test_a_peer_is_measured_together_with_the_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    installed(WorkFolder(tmp_path, TINY), "ctranslate2")
    peer = Peer("fake int4", "ctranslate2", str(FAKE), (), "none", {"step": 10.0})
    found = compare(CompareOptions(TINY, tmp_path, (tiny_bundle,), (peer,), None, WORKLOAD, 1, 1, setup=False), print)
    ours, fake = found.subjects
    assert (ours.name, fake.name) == ("spaceport float32", "fake int4")
    assert found.references == ("spaceport float32",)
    assert fake.results["decode"].ratios["spaceport float32"].median > 100
    assert fake.results["prefill"].ratios["spaceport float32"].median > 100
    assert fake.skipped == {"1 row": "it cannot", "4 rows": "it cannot"}
    assert "Time relative to spaceport float32" in markdown_of(found)


def test_mistakes_are_reported_before_anything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, code, message in (
        ("", INPUT, "has no bundle of tiny: give --bundle, or add --setup"),
        ("--rounds 0", USAGE, "expected at least 1 of each"),
        ("--rows 1,x", USAGE, "expected comma-separated numbers"),
        ("--peers nobody", USAGE, "--peers names 'nobody'"),
        ("--gguf none.gguf", INPUT, "none.gguf: no such file: expected a GGUF file"),
        ("--plot none/there.svg", USAGE, "does not exist: create it first"),
    ):
        assert run(["bench", "compare", str(TINY), "--work", str(tmp_path), *options.split()]) == code
        assert message in capsys.readouterr().err


def test_bundles_that_cannot_be_measured_are_refused(tiny_bundle: Path, demo_bundle: Path, tmp_path: Path) -> None:
    for bundle, workload, message in (
        (tiny_bundle, Workload(prefill=10**6), "1000001 are needed: lower --prefill"),
        (demo_bundle, WORKLOAD, r"has \d+ layers, .*tiny has \d+: expected a bundle of it"),
    ):
        with pytest.raises(InputFault, match=message):
            compare(CompareOptions(TINY, tmp_path, (bundle,), (), None, workload, 1, 1, setup=False), print)
