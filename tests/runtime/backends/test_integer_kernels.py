"""Integer kernels: ONNX Runtime's products are exact on this CPU, and a CPU on which they are not is refused."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from spaceport.runtime.backends import integer_kernels, on_onnxruntime
from spaceport.runtime.backends.integer_kernels import INPUTS, OUTPUTS, WEIGHT
from spaceport.runtime.bundle import BundleError
from spaceport.runtime.session import Runtime
from support.exported import exported_once


def probe() -> onnx.ModelProto:
    """The model that the module holds in base64."""
    weight = helper.make_tensor("v", TensorProto.INT8, [1], [WEIGHT])
    constants = {
        "shape": np.array([INPUTS, OUTPUTS], np.int64),
        "one": np.array(1, np.float32),
        "zero": np.array(0, np.uint8),
    }
    graph = helper.make_graph(
        [
            helper.make_node("ConstantOfShape", ["shape"], ["w"], value=weight),
            helper.make_node("MatMulIntegerToFloat", ["a", "w", "one", "one", "zero"], ["y"], domain="com.microsoft"),
        ],
        "g",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, ["r", INPUTS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["r", OUTPUTS])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10, producer_name="spaceport")


def test_the_model_that_is_asked_is_the_one_described_here() -> None:
    assert onnx.load_from_string(base64.b64decode(integer_kernels._MODEL)) == probe()


def test_products_are_exact_here() -> None:
    assert integer_kernels.is_exact(setting=False)


def test_the_slower_kernels_are_exact_too_and_chosen_only_where_the_usual_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert integer_kernels.is_exact(setting=True)
    name = integer_kernels.EXACT_SETTING[0]
    for usual in (True, False):
        monkeypatch.setattr(on_onnxruntime, "is_exact", lambda setting, usual=usual: usual or setting)
        options = on_onnxruntime.session_options(1, "int8", "int8x2")
        try:
            chosen = options.get_session_config_entry(name)
        except RuntimeError:  # there is no such entry
            chosen = "0"
        assert chosen == ("0" if usual else "1")


def test_products_that_are_cut_off_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Saturating:
        def __init__(self, *given: object, **named: object) -> None: ...

        def run(self, outputs: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
            exact = np.full((len(feeds["a"]), OUTPUTS), 255.0 * WEIGHT * INPUTS, np.float32)
            return [np.minimum(exact, 32767.0 * INPUTS / 2)]

    integer_kernels.is_exact.cache_clear()
    monkeypatch.setattr(integer_kernels.ort, "InferenceSession", Saturating)
    assert not integer_kernels.is_exact(setting=False)
    integer_kernels.is_exact.cache_clear()


def test_a_bundle_is_refused_where_products_are_not_exact(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle: Path = exported_once(tmp_path_factory, "scatter", weights="int8")
    monkeypatch.setattr(on_onnxruntime, "is_exact", lambda setting: False)
    with pytest.raises(BundleError, match=r"cuts sums of 8-bit products off on this CPU.*--weights int4"):
        Runtime.open(bundle)
