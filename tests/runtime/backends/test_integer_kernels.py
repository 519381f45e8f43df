"""Integer kernels: ONNX Runtime's products are exact on this CPU, and a CPU on which they are not is refused."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from spaceport.runtime.backends import integer_kernels, on_onnxruntime
from spaceport.runtime.backends.cpus import instruction_sets
from spaceport.runtime.backends.integer_kernels import INPUTS, OUTPUTS, WEIGHT
from spaceport.runtime.bundle import BundleError
from spaceport.runtime.session import Runtime
from support.exported import exported_once


def probe() -> onnx.ModelProto:
    """The model that the module writes without the package onnx."""
    constants = {
        "w": np.full((INPUTS, OUTPUTS), WEIGHT, np.int8),
        "one": np.array(1, np.float32),
        "zero": np.array(0, np.uint8),
    }
    graph = helper.make_graph(
        [helper.make_node("MatMulIntegerToFloat", ["a", "w", "one", "one", "zero"], ["y"], domain="com.microsoft")],
        "g",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, ["rows", INPUTS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", OUTPUTS])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


def test_the_model_that_is_asked_is_the_one_described_here() -> None:
    assert onnx.load_from_string(integer_kernels._largest_products()) == probe()


def test_products_of_int8_bundles_are_exact_here() -> None:
    """The usual kernels are exact on CPUs with VNNI; on others, sessions have the setting with which they are."""
    exact = integer_kernels.is_exact(setting=False)
    options = on_onnxruntime.session_options(1, "int8", "int8x2")
    session = ort.InferenceSession(probe().SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert has_vnni() is exact or has_vnni() is None
    assert entry(options, integer_kernels.EXACT_SETTING[0]) == ("0" if exact else "1")
    for rows in (1, 2, 9, 33):
        (found,) = session.run(None, {"a": np.full((rows, INPUTS), 255, np.uint8)})
        assert found.tolist() == [[255.0 * WEIGHT * INPUTS] * OUTPUTS] * rows


def has_vnni() -> bool | None:
    """Whether the CPU's flags name 8-bit dot products; None if they do not describe the CPU that kernels see."""
    if "LD_PRELOAD" in os.environ or platform.machine() != "x86_64":
        return None
    return not {"avx512_vnni", "avx_vnni"}.isdisjoint(instruction_sets())


def entry(options: ort.SessionOptions, name: str) -> str:
    """A session option, "0" without one."""
    try:
        found: str = options.get_session_config_entry(name)
    except RuntimeError:
        return "0"
    return found


def test_the_slower_kernels_are_exact_too_and_chosen_only_where_the_usual_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert integer_kernels.is_exact(setting=True)
    name = integer_kernels.EXACT_SETTING[0]
    for usual in (True, False):
        monkeypatch.setattr(on_onnxruntime, "is_exact", lambda setting, usual=usual: usual or setting)
        options = on_onnxruntime.session_options(1, "int8", "int8x2")
        assert entry(options, name) == ("0" if usual else "1")


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
