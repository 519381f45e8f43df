"""Layers: a check names the layer, the value and the case in which an injected fault first shows."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from spaceport.exporter.export import ExportOptions, export
from spaceport.graphs.decoder import Decoder
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.cli import run
from spaceport.tools.reference import open_reference
from spaceport.tools.verify.accuracy import Array, RecordedCall
from spaceport.tools.verify.check.check import CheckReport, check
from spaceport.tools.verify.check.check_options import CheckOptions
from spaceport.tools.verify.check.layers import FirstMismatch, LayerComparison, LayerValue, compare_layers
from support.families import FAMILIES, build
from support.paths import TINY
from support.planted import (
    forget_marks,
    ignore_the_window,
    leave_values_unwritten,
    perturb_last_norm,
    perturb_layer,
    perturb_one_weight,
    planted,
    read_stale_keys,
    shift_the_mask,
    swap_key_and_value,
    take_positions_for_granted,
)


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


@pytest.mark.parametrize(
    ("change", "value", "case"),
    [
        pytest.param(shift_the_mask, "layer 0, attention", "prompt, every row", id="shifted mask"),
        pytest.param(take_positions_for_granted, "layer 0, keys", "SPACE steps, k = 5", id="position of a slot"),
        pytest.param(partial(swap_key_and_value, layer=1), "layer 1, keys", "prompt, every row", id="swapped"),
        pytest.param(read_stale_keys, "layer 0, attention", "prompt, every row", id="stale keys read"),
        pytest.param(partial(leave_values_unwritten, layer=2), "layer 2, values", "prompt, every row", id="unwritten"),
        *(
            pytest.param(partial(perturb_layer, layer=i), f"layer {i}, output", "prompt, every row", id=f"weight {i}")
            for i in range(3)
        ),
        pytest.param(perturb_one_weight, "logits", "prompt, every row", id="tied embedding"),
        pytest.param(perturb_last_norm, "logits", "prompt, every row", id="last norm"),
    ],
)
def test_an_injected_fault_is_found_in_its_layer(
    change: Callable[[onnx.ModelProto], None], value: str, case: str, tiny_bundle: Path, tmp_path: Path
) -> None:
    assert first_of(checked(planted(tiny_bundle, tmp_path / "bundle", change))) == (value, case)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose second layer has a window, and its bundle in half precision."""
    folder = tmp_path_factory.mktemp("windowed")
    (family,) = (family for family in FAMILIES if family.name == "qwen2")
    build(replace(family, options={**family.options, "vocab_size": 640})).save_pretrained(folder / "checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / "checkpoint")
    export(folder / "checkpoint", folder / "bundle", ExportOptions(dtype="float16"))
    return folder / "checkpoint", folder / "bundle"


@pytest.mark.nightly
def test_an_ignored_attention_window_is_found_in_cases_longer_than_the_window(
    windowed: tuple[Path, Path], tmp_path: Path
) -> None:
    checkpoint, bundle = windowed
    correct = checked(bundle, checkpoint)
    assert correct.passed
    assert [(pair.first, pair.second, pair.dtype) for pair in correct.pairs] == [
        ("PyTorch float32", "PyTorch float16", "float16"),
        ("PyTorch float32", "onnxruntime float16", "float16"),
        ("PyTorch float16", "onnxruntime float16", "float16"),
    ]
    report = checked(planted(bundle, tmp_path / "bundle", ignore_the_window), checkpoint)
    assert first_of(report) == ("layer 1, attention", "prompt, every row")
    assert [pair.passed for pair in report.pairs] == [True, False, False]
    assert report.suspect == "onnxruntime float16"
    assert correct.suspect is None
    assert str(report.layers).endswith("; layer 0 agrees")


@pytest.mark.nightly
def test_the_model_in_half_precision_keeps_its_rotary_frequencies(windowed: tuple[Path, Path]) -> None:
    checkpoint, bundle = windowed
    reference = open_reference(open_bundle(bundle), checkpoint, 64, 1, "float16")
    assert isinstance(reference.module, Decoder)
    kinds = {name: buffer.dtype for name, buffer in reference.module.model.named_buffers() if "inv_freq" in name}
    assert set(kinds.values()) == {torch.float32}


class FixedValues:
    """A layer runner with the same values in every call."""

    def __init__(self, values: list[float]) -> None:
        self._values = values

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {each.name: np.full((1, 2, 64, 4), value) for each, value in zip(VALUES, self._values, strict=True)}


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
    call = RecordedCall("a", {"attention_mask": np.ones((1, 1, 2, 64), np.bool_)}, np.zeros((1, 1, 4), np.float32))
    found = compare_layers(FixedValues([100, 10, 1, 1]), FixedValues(values), VALUES, [call], 1e-4, "both")
    first = found.first_mismatch
    assert (first and str(first)) == (expected and f"first out of tolerance: {expected}")
    assert json.dumps(found.as_dict(), allow_nan=False)


def test_a_correct_bundle_agrees_in_every_value_of_every_layer(
    tiny_append_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--long-context", "40", "--threads", "1", "--layers")
    assert run(["check", str(tiny_append_bundle), str(TINY), *flags, "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    kinds = ("present.{}.key", "present.{}.value", "layers.{}.attention", "layers.{}.output")
    assert layers["values"] == [*(kind.format(layer) for layer in range(3) for kind in kinds), "logits"]
    assert layers["first_mismatch"] is None
    assert re.match(r"all 3 layers agree in keys, values, attention and output \(at most 0\.0\d+ of", layers["summary"])


def test_a_correct_int8_bundle_agrees_in_every_value_and_an_injected_fault_is_found(
    tiny_int8_bundle: Path, tmp_path: Path
) -> None:
    correct = checked(tiny_int8_bundle)
    assert correct.passed
    assert str(correct.layers).startswith("all 3 layers agree in keys, values, attention and output")
    changed = planted(tiny_int8_bundle, tmp_path / "bundle", partial(swap_key_and_value, layer=1))
    assert first_of(checked(changed))[0] == "layer 1, keys"


def test_a_graph_without_marked_values_is_compared_by_keys_and_values(tiny_bundle: Path, tmp_path: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        perturb_layer(model, 1)
        forget_marks(model)

    report = checked(planted(tiny_bundle, tmp_path / "bundle", change))
    assert first_of(report)[0] == "layer 2, keys"
    assert re.search("layers 0 to 1 agree; the graph has no marks.*: export it again$", str(report.layers))


def test_layers_are_refused_without_a_checkpoint(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(tiny_bundle), "--layers"]) == 2
    assert "--layers compares with the PyTorch model: expected a CHECKPOINT" in capsys.readouterr().err


def test_a_layer_out_of_tolerance_fails_the_check_even_if_all_logits_agree() -> None:
    value = LayerValue("n", 0, "output")
    mismatch = FirstMismatch(value, "prompt", 0.5, 0.1)
    layers = LayerComparison("PyTorch and the graph", (value,), mismatch, (value, 5.0))
    report = CheckReport((), (), 1, (), {}, (), layers)
    assert not report.passed
    assert replace(report, layers=replace(layers, first_mismatch=None)).passed
