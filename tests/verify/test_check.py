"""Check: passes on a correct bundle, finds where an injected fault shows first, and compares each pair of engines within its tolerance."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import MissingDependency
from spaceport.graphs.contract.manifest import ACCURACY_FILE
from spaceport.graphs.contract.signature import Precision
from spaceport.kernels.native_library import library_path
from spaceport.runtime.backends import on_onnxruntime
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.runtime.engine import Batch, EngineFault
from spaceport.tools.cli import run
from spaceport.verify.accuracy import ComparedEngine, ComparedPair, compare, compare_logits, merged
from spaceport.verify.cases import CheckOptions, RecordedCall
from spaceport.verify.check import CheckReport, check, select_engines
from spaceport.verify.layers import FirstMismatch, LayerComparison, LayerValue, RunLayers, compare_layers
from support.hash_engine import HashEngine, Language
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
from support.small_bundle import fill
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


Logits = NDArray[np.float32]
CASES = ("first", "first", "second", "third")


def logits(*rows: list[float]) -> Logits:
    return np.array([rows], np.float32)


def test_a_difference_counts_disagreements_and_has_the_smallest_margin() -> None:
    expected = logits([1.0, 3.0, 2.5], [0.0, 4.0, 1.0], [2.0, 2.25, 0.0])
    got = logits([1.0, 2.0, 2.5], [0.0, 4.0, 1.0], [2.5, 2.25, 0.0])
    found = compare_logits("case", expected, got, 0.1)
    assert (found.rows, found.disagreements, found.max_error, found.margin) == (3, 2, 1.0, 0.25)
    assert not found.passed
    correct = compare_logits("case", expected, expected, 0.1)
    assert correct.passed
    assert correct.margin is None
    broken = compare_logits("case", logits([1.0, 2.0]), logits([1.0, float("nan")]), 0.1)
    assert not broken.passed
    assert not merged([correct, broken]).passed
    assert not merged([broken, correct]).passed


def pair_with(error: Logits, native: bool, experts: bool = False) -> ComparedPair:
    """Two engines whose logits (100 rows, the largest 1) differ by an error in each row."""
    expected = np.ones((1, 100, 4), np.float32)
    found = compare_logits("case", expected, expected + error[None, :, None], 0.2)
    return ComparedPair("a", "b", "float32", (found,), 0.2, native, experts)


@pytest.mark.parametrize(
    ("rows", "error", "others", "native", "experts", "passed"),
    [
        (1, 0.19, 0.0, True, False, True),
        (1, 0.3, 0.0, True, False, False),
        (8, 0.3, 0.0, True, True, False),  # their mean
        (6, 0.3, 0.0, True, True, True),
        (9, 0.21, 0.0, True, True, False),  # their number
        (1, np.nan, 0.0, True, True, False),
        (0, 0.0, 0.019, True, False, True),
        (0, 0.0, 0.03, True, False, False),
        (0, 0.0, 0.03, False, False, True),
    ],
)
def test_rounding_explains_small_errors_on_average_and_other_experts_of_few_rows(
    rows: int, error: float, others: float, native: bool, experts: bool, passed: bool
) -> None:
    errors = np.full(100, others, np.float32)
    errors[:rows] = error
    assert pair_with(errors, native, experts).passed == passed


def calls() -> list[RecordedCall]:
    """Four calls of three cases, whose logits rise from call to call."""
    logits = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    mask = np.ones((1, 1, 3, 64), np.bool_)
    return [
        RecordedCall(case, Batch(0, *[np.full((1, 3), number)] * 3, mask, np.zeros((1, 3), np.int64)), logits + number)
        for number, case in enumerate(CASES)
    ]


def unchanged(number: int, logits: Logits) -> Logits:
    return logits


open_now: list[HashEngine] = []


@dataclass
class ChangedEngine(HashEngine):
    """An engine that returns the recorded logits, changed; no two are open at a time."""

    change: Callable[[int, Logits], Logits] = unchanged

    def __post_init__(self) -> None:
        super().__post_init__()
        assert not open_now
        open_now.append(self)

    def run(self, batch: Batch) -> Logits:
        number = int(batch.input_ids[0, 0])
        return self.change(number, calls()[number].expected)

    def close(self) -> None:
        open_now.remove(self)


def changed_engine(
    name: str, change: Callable[[int, Logits], Logits] = unchanged, dtype: Precision = "float32"
) -> ComparedEngine:
    return ComparedEngine(name, dtype, lambda: ChangedEngine(Language(1), 64, 1, change=change))


def fail(*_: object) -> Logits:
    raise EngineFault("onnxruntime failed in a step")


def test_each_pair_has_the_tolerance_of_its_coarser_type() -> None:
    engines = [
        changed_engine("a", fail),  # the one that the calls were recorded on does not run again
        changed_engine("b", lambda number, logits: logits + np.float32(0.01), "float16"),
        changed_engine("c", lambda number, logits: logits + np.float32(0.01)),
        changed_engine("d", dtype="bfloat16"),
    ]
    pairs = compare(engines, calls())
    assert [(pair.first + pair.second, pair.dtype, pair.passed) for pair in pairs] == [
        ("ab", "float16", True),
        ("ac", "float32", False),
        ("ad", "bfloat16", True),
        ("bc", "float16", True),
        ("bd", "bfloat16", True),
        ("cd", "bfloat16", True),
    ]
    assert open_now == []


def test_an_engine_that_fails_in_one_case_fails_that_case_with_its_message() -> None:
    numbers: list[int] = []  # calls that the engine was run on

    def fail_first(number: int, logits: Logits) -> Logits:
        numbers.append(number)
        return fail() if number == 0 else logits

    pairs = compare([changed_engine("a"), changed_engine("b", fail_first), changed_engine("c")], calls())
    assert [[difference.passed for difference in pair.differences] for pair in pairs] == [
        [False, True, True],
        [True, True, True],
        [False, True, True],
    ]
    assert {pair.worst.fault for pair in pairs} == {"b: onnxruntime failed in a step", None}
    assert len(numbers) == 3, "after a failure the rest of the case is not run"
    assert json.dumps(pairs[0].as_dict(), allow_nan=False)


def test_what_cannot_be_compared_is_refused(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        ((), "only onnxruntime float32 runs it here, expected two engines to compare: name the CHECKPOINT"),
        (("--layers",), "--layers compares with the PyTorch model: expected a CHECKPOINT"),
    ):
        assert run(["check", str(tiny_bundle), *flags]) == 2
        assert message in capsys.readouterr().err
    manifest = fill(tmp_path)
    bundle = Bundle(
        tmp_path, replace(manifest, format="bfloat16", signature=replace(manifest.signature, dtype="bfloat16"))
    )
    with pytest.raises(MissingDependency, match=r"no backend runs it here: .*its format is bfloat16"):
        select_engines(bundle, CheckOptions(TINY, backends=()))
