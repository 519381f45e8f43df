"""Check: passes on a correct bundle, and names the layer, the value and the case in which an injected fault shows first."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

from spaceport.graphs.contract.manifest import ACCURACY_FILE
from spaceport.kernels.native_library import library_path
from spaceport.runtime.backends import on_onnxruntime
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.engine import Batch
from spaceport.tools.cli import run
from spaceport.verify.cases import CheckOptions, RecordedCall
from spaceport.verify.check import CheckReport, check
from spaceport.verify.layers import FirstMismatch, LayerComparison, LayerValue, RunLayers, compare_layers
from support.paths import TINY
from support.planted import (
    forget_marks,
    ignore_the_mask,
    misplace_slots,
    perturb_layer,
    perturb_one_weight,
    planted,
    read_stale_keys,
    spoil_functions,
    swap_key_and_value,
    swap_weights,
    take_positions_for_granted,
)
from support.tiers import NO_TORCH

Capture = pytest.CaptureFixture[str]
SHORT = ("--long-context", "40", "--threads", "1")


def test_a_correct_bundle_passes_in_every_case(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    assert run(["check", str(bundle), str(TINY), "--long-context", "200", "--threads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((bundle / ACCURACY_FILE).read_text("utf-8"))
    names = " ".join(case["case"] for case in report["cases"])
    kinds = "prompt, calls of 1 to 24 rows, cached rows, SPACE, draft trees, random tree, padding, two requests"
    for kind in (*kinds.split(", "), "forked threads", "slot 64", "long context"):
        assert kind in names
    assert all(case["passed"] and case["disagreements"] == 0 for case in report["cases"])
    assert max(case["max_error"] for case in report["cases"]) < 1e-4
    assert run(["inspect", str(bundle)]) == 0
    assert "Accuracy: passed" in capsys.readouterr().out


def test_a_report_that_cannot_be_saved_is_printed(
    tiny_bundle: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    command = ["check", str(bundle), str(TINY), "--long-context", "32", "--threads", "1"]
    (bundle / ACCURACY_FILE).mkdir()
    assert run(command) == 1
    output, errors = capsys.readouterr()
    assert "PASS" in output
    assert "Is a directory" in errors
    (bundle / ACCURACY_FILE).rmdir()
    monkeypatch.setattr(os, "access", lambda path, mode, **options: mode != os.W_OK)
    assert run([*command, "--json"]) == 0
    output, errors = capsys.readouterr()
    assert f"{bundle} is read-only: the report is printed to stdout and not saved in the bundle" in errors
    assert json.loads(output)["passed"] is True


def test_a_bundle_of_another_checkpoint_is_refused(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    other = shutil.copytree(TINY, tmp_path / "other")
    config = json.loads((other / "config.json").read_text("utf-8"))
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}), "utf-8")
    assert run(["check", str(tiny_bundle), str(other)]) == 3
    assert "layers is 2, the bundle's is 3: expected the checkpoint" in capsys.readouterr().err


def checked(bundle: Path, checkpoint: Path = TINY, length: int = 40) -> CheckReport:
    return check(open_bundle(bundle), CheckOptions(checkpoint, length=length, threads=1, layers=True))


def first_of(report: CheckReport) -> tuple[str, str]:
    """The value and the case that a check with --layers names; the case is the first failed one."""
    assert report.layers is not None
    assert report.layers.first_mismatch is not None
    assert not report.passed
    failed = [difference.case for difference in report.differences if not difference.passed]
    assert report.layers.first_mismatch.case == failed[0]
    return str(report.layers.first_mismatch.value), failed[0]


PROMPT = "prompt, every row"


@pytest.mark.parametrize(
    ("change", "value", "case"),
    [
        pytest.param(ignore_the_mask, "layer 0, attention", PROMPT, id="ignored mask"),
        pytest.param(take_positions_for_granted, "layer 0, keys", "SPACE steps, k = 5", id="position of a slot"),
        pytest.param(partial(swap_key_and_value, layer=1), "layer 1, keys", PROMPT, id="swapped"),
        pytest.param(read_stale_keys, "layer 0, attention", PROMPT, id="stale keys read"),
        pytest.param(partial(perturb_layer, layer=1), "layer 1, output", PROMPT, id="weight"),
        pytest.param(perturb_one_weight, "logits", PROMPT, id="tied embedding"),
    ],
)
def test_an_injected_fault_is_found_in_its_layer(
    change: Callable[[onnx.ModelProto], None], value: str, case: str, tiny_bundle: Path, tmp_path: Path
) -> None:
    assert first_of(checked(planted(tiny_bundle, tmp_path / "bundle", change))) == (value, case)


def test_a_fault_in_calls_of_one_row_count_is_found(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = planted(tiny_bundle, tmp_path / "bundle", partial(misplace_slots, rows=24))
    report = check(open_bundle(bundle), CheckOptions(TINY, length=40, threads=1))
    assert "prompts in calls of 1 to 24 rows" in {case.case for case in report.differences if not case.passed}


def test_correct_bundles_agree_in_every_value_and_an_injected_fault_is_found_in_int8(
    tiny_append_bundle: Path, tiny_int8_bundle: Path, tmp_path: Path
) -> None:
    for bundle, kinds in (
        (tiny_append_bundle, "keys, values, attention and output"),
        (tiny_int8_bundle, "values and output"),
    ):
        correct = checked(bundle)
        assert correct.passed
        assert str(correct.layers).startswith(f"all 3 layers agree in {kinds}")
    changed = planted(
        tiny_int8_bundle, tmp_path / "bundle", partial(swap_weights, first="layers.1.qkv.1", second="layers.1.qkv.2")
    )
    assert first_of(checked(changed))[0] == "layer 1, values"


def test_a_graph_without_marked_values_is_compared_by_keys_and_values(
    tiny_bundle: Path, tmp_path: Path, capsys: Capture
) -> None:
    def change(model: onnx.ModelProto) -> None:
        perturb_layer(model, 1)
        forget_marks(model)

    bundle = planted(tiny_bundle, tmp_path / "bundle", change)
    assert run(["check", str(bundle), str(TINY), *SHORT, "--layers", "--json"]) == 4
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert re.search(r"layer 2, keys.*layers 0 to 1 agree; the graph has no marks.*: export it", layers["summary"])
    assert run(["inspect", str(bundle)]) == 0
    assert "Accuracy: FAILED" in capsys.readouterr().out


needs_library = pytest.mark.skipif(library_path() is None, reason="no C++ compiler")


@needs_library
@pytest.mark.parametrize("large", [False, True])
def test_native_operators_are_compared_with_standard_operators_where_torch_is_not_installed(
    tiny_int8_bundle: Path, tmp_path: Path, large: bool
) -> None:
    bundle = shutil.copytree(tiny_int8_bundle, tmp_path / "bundle")
    program = (
        f"import sys; sys.path.insert(0, {str(NO_TORCH)!r}); from spaceport.runtime.backends import on_onnxruntime; "
        f"on_onnxruntime.MOST_FOLDED //= {1000 if large else 1}; from spaceport.tools.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "check", str(bundle), "--threads", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (pair,) = report["pairs"]
    assert (pair["first"], pair["second"]) == ("standard operators int8", "onnxruntime int8")
    assert pair["agreement"] > 0.8  # few rows, with near ties
    assert (report["quick"], report["calls"]) == (True, 3) if large else report["calls"] > 50
    assert bool(report["skipped"]) == large


@needs_library
@pytest.mark.parametrize("kind", ["Embed", "NormProduct", "AddProduct", "GateProduct", "Head", "Attend"])
def test_a_native_operator_that_computes_something_else_is_found_in_few_calls(
    tiny_int8_bundle: Path, tmp_path: Path, kind: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_onnxruntime, "MOST_FOLDED", 1000)
    bundle = planted(tiny_int8_bundle, tmp_path / "bundle", partial(spoil_functions, kind=kind))
    assert run(["check", str(bundle), "--threads", "1"]) == 4
    assert "FAIL" in capsys.readouterr().out


def fixed(values: list[float]) -> RunLayers:
    """The same values in every call."""
    return lambda call: {each.name: np.full((1, 2, 64, 4), value) for each, value in zip(VALUES, values, strict=True)}


VALUES = (
    *(LayerValue(f"present.{layer}.key", layer, "keys") for layer in range(3)),
    LayerValue("logits", None, "logits"),
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([100, 10.0009, 1, 1], None),
        ([100, 10.0011, 1, 1], "layer 1, keys (max error 0.0011, 0.001 allowed), case 'a'; layer 0 agrees"),
        ([100.1, 1, 1, 1], "layer 0, keys (max error 0.1, 0.01 allowed), case 'a'; nothing comes before it"),
        ([100, 10, float("nan"), 1], "layer 2, keys (max error nan, 0.0001 allowed), case 'a'; layers 0 to 1 agree"),
        ([100, 10, 1, 1.1], "logits (max error 0.1, 0.0001 allowed), case 'a'; all layers agree"),
    ],
)
def test_the_tolerance_of_a_value_is_relative_to_its_own_magnitude(values: list[float], expected: str | None) -> None:
    ids, visible = np.zeros((1, 2), np.int64), np.ones((1, 1, 2, 64), np.bool_)
    call = RecordedCall("a", Batch(0, ids, ids, ids, visible, ids), np.zeros((1, 1, 4), np.float32))
    found = compare_layers(fixed([100, 10, 1, 1]), fixed(values), VALUES, [call], 1e-4, "both")
    first = found.first_mismatch
    assert (first and str(first)) == (expected and f"first out of tolerance: {expected}")
    assert json.dumps(found.as_dict(), allow_nan=False)


def test_a_layer_out_of_tolerance_fails_the_check_even_if_all_logits_agree() -> None:
    value = LayerValue("n", 0, "output")
    mismatch = FirstMismatch(value, "prompt", 0.5, 0.1)
    layers = LayerComparison("PyTorch and the graph", (value,), mismatch, (value, 5.0))
    report = CheckReport((), (), False, 1, (), {}, (), layers)
    assert not report.passed
    assert replace(report, layers=replace(layers, first_mismatch=None)).passed
