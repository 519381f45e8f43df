"""Check: passes on a correct bundle, fails on every injected fault and names the case."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import ACCURACY_FILE, TokenIds
from spaceport.graphs.contract.signature import LOWERINGS, STEP_ROWS, Lowering, visible_length
from spaceport.tools.cli import run
from spaceport.tools.verify.accuracy import compare_logits, merged
from spaceport.tools.verify.check.cases import REQUESTS, EngineLimits, record
from support.hash_engine import CHILD, END, FORK, MASKS, HashEngine, Language
from support.paths import ROOT
from support.planted import (
    ignore_the_mask,
    perturb_one_weight,
    planted,
    read_stale_keys,
    swap_key_and_value,
    take_positions_for_granted,
)
from support.small_bundle import fill

TINY = ROOT / "tests" / "data" / "tiny"


def check(bundle: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = run(["check", str(bundle), str(TINY), "--long-context", "200", "--threads", "1", *flags])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("lowering", ["scatter", "append"])
def test_a_correct_bundle_passes_in_every_case(
    lowering: str, tiny_bundle: Path, tiny_append_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle if lowering == "scatter" else tiny_append_bundle, bundle)
    code, out = check(bundle, capsys, "--json")
    report = json.loads(out)
    assert code == 0
    assert report == json.loads((bundle / "accuracy.json").read_text("utf-8"))
    names = " ".join(case["case"] for case in report["cases"])
    for part in (
        "prompt",
        "chunks",
        "cached rows",
        "SPACE",
        "draft trees",
        "random tree",
        "padding",
        "two requests",
        "forked threads",
        "slot 64",
        "long context",
    ):
        assert part in names
    assert all(case["passed"] and case["disagreements"] == 0 for case in report["cases"])
    assert max(case["max_error"] for case in report["cases"]) < 1e-4
    assert run(["inspect", str(bundle)]) == 0
    assert "Accuracy: passed" in capsys.readouterr().out


def test_the_result_is_printed_even_if_the_report_cannot_be_written(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    (bundle / ACCURACY_FILE).mkdir()
    code = run(["check", str(bundle), str(TINY), "--long-context", "32", "--threads", "1"])
    captured = capsys.readouterr()
    assert "PASS" in captured.out
    assert code == 1
    assert "Is a directory" in captured.err


def without_override() -> None:
    """Drop the capability with which root writes to read-only folders; takes effect when the process starts a program."""
    PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
    if os.geteuid() == 0:
        assert ctypes.CDLL(None, use_errno=True).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0) == 0


@pytest.mark.slow
def test_a_read_only_bundle_passes_and_the_report_is_printed(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    bundle.chmod(0o555)
    program = [sys.executable, "-c", "from spaceport.tools.cli import main; main()"]
    arguments = ["check", str(bundle), str(TINY), "--long-context", "32", "--threads", "1", "--json"]
    try:
        done = subprocess.run(
            [*program, *arguments], capture_output=True, text=True, check=False, preexec_fn=without_override
        )
    finally:
        bundle.chmod(0o755)
    first, *others = done.stderr.splitlines()
    assert first == (
        f"{bundle} is read-only: the report is printed to stdout and not saved in the bundle; --json prints all of it"
    )
    assert not any("read-only" in line for line in others)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"] is True
    assert not (bundle / ACCURACY_FILE).exists()


@pytest.mark.parametrize("tokens", [TokenIds(MASKS, FORK, CHILD, (END,)), TokenIds(MASKS), TokenIds()])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_every_kind_of_call_is_among_the_cases(tokens: TokenIds, lowering: Lowering, tmp_path: Path) -> None:
    """On an engine that refuses wrong attention masks; [Fork] and its [Child] are fed in the same step."""
    limits = EngineLimits(64, visible_length(64 + STEP_ROWS + 1), REQUESTS, 512)
    engine = HashEngine(Language(1, 70), limits.capacity, limits.requests, lowering, masks=tokens.mask)
    manifest = replace(fill(tmp_path), signature=engine.signature, tokens=tokens, max_mask_slots=len(tokens.mask))
    calls, skipped = record(engine, manifest, limits)
    assert len(calls) == engine.calls
    assert not skipped
    fork, child = (FORK, CHILD) if tokens.fork is not None else (0, 1)
    shared = [same_call_forks(call.arrays, fork, child) for call in calls if call.case.startswith("forked threads")]
    assert sum(map(bool, shared)) >= 2
    trees = [call.arrays for call in calls if call.case.startswith("draft trees")]
    assert bool(trees) == bool(tokens.mask)
    assert not trees or any(siblings(arrays) for arrays in trees)


def same_call_forks(arrays: dict[str, NDArray[Any]], fork: int, child: int) -> int:
    """Number of [Child] rows that see their [Fork] row in the same call."""
    ids, positions, mask = arrays["input_ids"][0], arrays["position_ids"][0], arrays["attention_mask"][0, 0]
    slots = arrays["slot_ids"][0]
    return sum(
        bool(mask[row, slots[other]]) and positions[row] == positions[other] + 1
        for row in np.flatnonzero(ids == child)
        for other in np.flatnonzero(ids[:row] == fork)
    )


def siblings(arrays: dict[str, NDArray[Any]]) -> bool:
    """Whether two candidates have the same position and the same preceding tokens."""
    mask, words = arrays["attention_mask"][0, 0].copy(), np.flatnonzero(~np.isin(arrays["input_ids"][0], MASKS))
    mask[np.arange(len(mask)), arrays["slot_ids"][0]] = False
    return any(np.array_equal(mask[row], mask[other]) for row in words for other in words if row < other)


@pytest.mark.parametrize(
    "change", [perturb_one_weight, swap_key_and_value, read_stale_keys, ignore_the_mask, take_positions_for_granted]
)
def test_an_injected_fault_fails(
    change: Callable[[onnx.ModelProto], None], tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = planted(tiny_bundle, tmp_path / "bundle", change)
    code, out = check(bundle, capsys)
    assert code == 4
    assert "FAIL" in out
    assert run(["inspect", str(bundle)]) == 0
    assert "Accuracy: FAILED" in capsys.readouterr().out


def test_positions_taken_from_slots_fail_only_in_cases_where_the_two_differ(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = planted(tiny_bundle, tmp_path / "bundle", take_positions_for_granted)
    _, out = check(bundle, capsys, "--json")
    verdicts = {case["case"]: case["passed"] for case in json.loads(out)["cases"]}
    assert verdicts["cached rows"]
    assert not verdicts["SPACE steps, k = 5"]
    assert not verdicts["random tree 1"]


def test_a_bundle_of_another_checkpoint_is_refused(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(TINY, other)
    config = json.loads((other / "config.json").read_text("utf-8"))
    config["num_hidden_layers"] = 2
    (other / "config.json").write_text(json.dumps(config), "utf-8")
    assert run(["check", str(tiny_bundle), str(other)]) == 3
    assert "layers is 2, the bundle's is 3: expected the checkpoint" in capsys.readouterr().err


def logits(*rows: list[float]) -> NDArray[np.float32]:
    return np.array([rows], np.float32)


def test_a_difference_counts_disagreements_and_has_the_smallest_margin() -> None:
    expected = logits([1.0, 3.0, 2.5], [0.0, 4.0, 1.0], [2.0, 2.25, 0.0])
    got = logits([1.0, 2.0, 2.5], [0.0, 4.0, 1.0], [2.5, 2.25, 0.0])
    found = compare_logits("case", expected, got, 0.1)
    assert (found.rows, found.disagreements, found.max_error, found.margin) == (3, 2, 1.0, 0.25)
    assert not found.passed
    assert compare_logits("case", expected, expected, 0.1).margin is None


def test_nan_logits_fail_alone_and_merged() -> None:
    correct = compare_logits("case", logits([1.0, 2.0]), logits([1.0, 2.0]), 0.1)
    broken = compare_logits("case", logits([1.0, 2.0]), logits([1.0, float("nan")]), 0.1)
    assert correct.passed
    assert not broken.passed
    assert not merged([correct, broken]).passed
    assert not merged([broken, correct]).passed


def test_the_tolerance_scales_with_logits_above_one() -> None:
    large = logits([0.0, 500.0])
    assert compare_logits("case", large, large + np.float32(0.04), 1e-4).passed
    small = logits([0.0, 0.01])
    assert not compare_logits("case", small, small + np.float32(2e-4), 1e-4).passed


def test_stock_polygraphy_runs_the_graph_on_the_shipped_loader(tiny_bundle: Path) -> None:
    polygraphy = Path(sys.executable).with_name("polygraphy")
    loader = ROOT / "tools" / "verify" / "check" / "polygraphy_loader.py"
    flags = ("--onnxrt", "--data-loader-script", str(loader), "--validate")
    command = [str(polygraphy), "run", str(tiny_bundle / "model.onnx"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
    assert done.stdout.count("Output: logits is valid") == 4
