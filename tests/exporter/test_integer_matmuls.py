"""Integer matmuls: graphs of int8 bundles quantize each row by itself, like the PyTorch reference."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from spaceport.exporter.export import ExportOptions
from spaceport.graphs.contract.manifest import MODEL_FILE
from spaceport.graphs.contract.signature import Activations, Lowering
from spaceport.graphs.contract.tolerance import tolerance_of
from spaceport.runtime.backends.on_onnxruntime import OnnxRuntimeEngine, open_session, session_options
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.runtime.engine import Batch, Engine
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, USAGE
from spaceport.tools.reference import open_reference
from support.exported import bundle_of
from support.paths import DEMO, TINY
from support.small_bundle import edit, new_bundle

SLOTS, LAYERS = 192, 3
Logits = NDArray[np.float32]
Capture = pytest.CaptureFixture[str]


def exported(activations: Activations = "int8x2", lowering: Lowering = "scatter") -> Path:
    return bundle_of(TINY, ExportOptions(lowering, weights="int8", requested_activations=activations))


def engine_of(bundle: Bundle) -> OnnxRuntimeEngine:
    options = session_options(1, bundle.manifest.weights, bundle.manifest.activations)
    session = open_session(bundle, options, ["CPUExecutionProvider"])
    return OnnxRuntimeEngine(session, bundle.manifest.signature, SLOTS, 3)


def fed(engine: Engine, ids: NDArray[np.int64], widths: list[int], beside: int = 0) -> Logits:
    """The logits of a text fed in steps of these widths, with `beside` other requests in each call."""
    dice, found, start = np.random.default_rng(5), [], 0
    others = dice.integers(3, 600, (beside, ids.size))
    texts = np.concatenate((ids[None], others))
    for width in widths:
        rows = np.arange(start, start + width)
        mask = np.arange(SLOTS)[None, :] <= rows[:, None]
        batch = Batch(
            first=0,
            input_ids=texts[:, rows].copy(),
            position_ids=np.repeat(rows[None], beside + 1, 0),
            slot_ids=np.repeat(rows[None], beside + 1, 0),
            attention_mask=np.repeat(mask[None, None], beside + 1, 0),
            logit_rows=np.repeat(np.arange(width)[None], beside + 1, 0),
        )
        found.append(engine.run(batch)[0].copy())
        start += width
    return np.concatenate(found)


@pytest.fixture(scope="module")
def text() -> NDArray[np.int64]:
    return np.random.default_rng(1).integers(3, 600, 72)


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["int8x2", "int8"])
def test_rows_are_bit_identical_alone_with_other_rows_and_with_other_requests(
    text: NDArray[np.int64], activations: Activations
) -> None:
    engine = engine_of(open_bundle(exported(activations)))
    alone = fed(engine, text, [1] * 72)
    for widths in ([36, 36], [9] * 8, [2, 4, 66]):
        np.testing.assert_array_equal(fed(engine, text, widths), alone)
    np.testing.assert_array_equal(fed(engine, text, [36, 36], beside=2), alone)


@pytest.mark.parametrize(
    ("lowering", "activations"),
    [("scatter", "int8x2"), ("scatter", "int8"), pytest.param("append", "int8x2", marks=pytest.mark.nightly)],
)
def test_the_reference_quantizes_as_the_graph_does(
    text: NDArray[np.int64], lowering: Lowering, activations: Activations
) -> None:
    bundle = exported(activations, lowering)
    assert error_of(bundle, engine_of(open_bundle(bundle)), text) <= tolerance_of("float32", activations)


def test_all_matmuls_with_weights_are_int8_and_their_inputs_are_quantized_once() -> None:
    graph = onnx.load(str(exported() / MODEL_FILE), load_external_data=False).graph
    kinds = Counter(node.op_type for node in graph.node)
    # query, key and value; output; gate and up; down; and the head
    assert kinds["MatMulIntegerToFloat"] == 4 * LAYERS + 1
    assert kinds["QuantizeLinear"] == 2 * kinds["MatMulIntegerToFloat"]  # a high and a low limb
    large = [value for value in graph.initializer if np.prod(value.dims) > 4096]
    assert {value.data_type for value in large} == {onnx.TensorProto.INT8}


Change = Callable[[onnx.ModelProto], int]


def constants(model: onnx.ModelProto, matching: str) -> list[onnx.TensorProto]:
    return [value for value in model.graph.initializer if matching in value.name]


def no_low_limb(model: onnx.ModelProto) -> int:
    for value in constants(model, "integer.factors"):
        value.CopyFrom(numpy_helper.from_array(np.array([[1, 0]], np.float32), value.name))
    return len(constants(model, "integer.factors"))


def wrong_zero(model: onnx.ModelProto) -> int:
    products = [node for node in model.graph.node if node.op_type == "MatMulIntegerToFloat"]
    model.graph.initializer.append(numpy_helper.from_array(np.array(127, np.uint8), "wrong"))
    products[0].input[4] = "wrong"
    return len(products)


def shifted_scale(model: onnx.ModelProto) -> int:
    (scale,) = constants(model, "layers.0.mlp.down_proj.scale")
    scale.CopyFrom(numpy_helper.from_array(np.roll(numpy_helper.to_array(scale), 1), scale.name))
    return 1


def one_scale_for_all_rows(model: onnx.ModelProto) -> int:
    """Use the size of the largest row of the call for all rows."""
    sizes = [node for node in model.graph.node if node.op_type == "ReduceMax"]
    for node in sizes:
        del node.input[1:]
    return len(sizes)


@pytest.mark.parametrize("change", [no_low_limb, wrong_zero, shifted_scale])
def test_a_wrong_constant_is_out_of_tolerance(tmp_path: Path, text: NDArray[np.int64], change: Change) -> None:
    engine = engine_of(changed_bundle(exported(), tmp_path / "changed", change))
    assert error_of(exported(), engine, text) > tolerance_of("float32", "int8x2")


def test_one_scale_for_all_rows_makes_rows_depend_on_each_other(tmp_path: Path, text: NDArray[np.int64]) -> None:
    engine = engine_of(changed_bundle(exported("int8"), tmp_path / "changed", one_scale_for_all_rows))
    assert not np.array_equal(fed(engine, text, [36, 36]), fed(engine, text, [1] * 72))


def changed_bundle(bundle: Path, target: Path, change: Change) -> Bundle:
    """A copy of a bundle with a changed graph, opened without verifying hashes."""
    shutil.copytree(bundle, target)
    model = onnx.load(str(target / MODEL_FILE))
    assert change(model) > 0
    onnx.save(model, str(target / MODEL_FILE))
    return Bundle(target, open_bundle(bundle).manifest)


def error_of(bundle: Path, engine: Engine, text: NDArray[np.int64]) -> float:
    """The largest difference from the PyTorch reference, relative to the largest logit."""
    expected = fed(open_reference(open_bundle(bundle), TINY, SLOTS, 3), text, [36, 36])
    return float(np.abs(fed(engine, text, [36, 36]) - expected).max() / max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--calibration-data", "{prompts}", "--activations", "float"], USAGE, "expected --weights int8 with it"),
        (["--calibration-data", "{missing}"], INPUT, "expected a prompt file with one prompt per line"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    tmp_path: Path, capfd: Capture, flags: list[str], code: int, message: str
) -> None:
    (tmp_path / "prompts.txt").write_text("import json\n", "utf-8")
    named = {"prompts": str(tmp_path / "prompts.txt"), "missing": str(tmp_path / "missing.txt")}
    given = [flag.format(**named) for flag in flags]
    assert run(["export", str(TINY), str(tmp_path / "bundle"), "--weights", "int8", *given]) == code
    assert message in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "bundle").exists()


def test_an_int8_bundle_is_not_built_for_a_gpu(tmp_path: Path, capfd: Capture) -> None:
    bundle = new_bundle(tmp_path / "bundle")
    edit(bundle, lambda entries: entries.update(weights="int8", activations="int8x2"))
    edit(bundle, lambda entries: entries["signature"].update(lowering="append"))
    assert run(["build", str(bundle), "--target", "sm89"]) == INPUT
    assert "products are of 8-bit integers, which TensorRT does not have" in " ".join(capfd.readouterr().err.split())


@pytest.mark.nightly
@pytest.mark.slow
def test_calibration_prompts_are_read_from_a_file(tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "prompts.txt").write_text("import json\nclass Reader:\n", "utf-8")
    prompts = ["--calibration-data", str(tmp_path / "prompts.txt")]
    assert run(["export", str(DEMO), str(tmp_path / "bundle"), "--weights", "int8", *prompts, "--json"]) == 0
    assert '"activations": "int8x2"' in capfd.readouterr().out
