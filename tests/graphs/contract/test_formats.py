"""Formats are consistent, known to the backends, and in the table of the docs; types agree with each library."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper

from spaceport.graphs.contract.formats import FORMATS, Format
from spaceport.graphs.contract.signature import DTYPES, PRECISIONS, Signature
from spaceport.runtime.backends import BACKENDS
from support.paths import ROOT


@pytest.mark.parametrize("each", FORMATS.values(), ids=FORMATS.keys())
def test_a_format_is_consistent(each: Format) -> None:
    assert FORMATS[each.name] is each
    assert set(each.backends) <= BACKENDS.keys()
    assert each.lowerings
    assert each.native == (each.kv_cache == "int8")
    if each.native:
        assert (each.dtype, each.lowerings, each.backends) == ("float32", ("scatter",), ("onnxruntime",))
    elif each.weights == "same":
        assert each.name == each.dtype
    else:
        assert (each.name, each.lowerings) == (f"{each.dtype}-{each.weights}", ("append",))
        assert "onnxruntime-cuda" not in each.backends  # it runs scatter-lowered graphs only


def test_the_docs_have_each_format_with_its_purpose() -> None:
    page = (ROOT / "docs" / "quantization.md").read_text("utf-8")
    rows = re.findall(
        r"^\| (`.*`) \| (.*) \|$", page.partition("| format | for |")[2].partition("\n\n")[0], re.MULTILINE
    )
    documented = {name: purpose for names, purpose in rows for name in re.findall(r"`([^`]+)`", names)}
    assert documented == {name: each.purpose for name, each in FORMATS.items()}


@pytest.mark.parametrize("name", DTYPES)
def test_a_type_has_its_name_and_size_in_each_library(name: str) -> None:
    assert getattr(torch, name).itemsize == DTYPES[name].bytes
    spelled = {"float32": "FLOAT"}.get(name, name.upper())
    assert onnx.TensorProto.DataType.Name(DTYPES[name].onnx) == spelled
    if name != "bfloat16":
        assert np.dtype(name) == helper.tensor_dtype_to_np_dtype(DTYPES[name].onnx)
    value, result = (helper.make_tensor_value_info(one, DTYPES[name].onnx, ["N"]) for one in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].type == f"tensor({DTYPES[name].onnxruntime})"
    api = pytest.importorskip("tensorrt_rtx")
    assert getattr(api.DataType, DTYPES[name].tensorrt).itemsize == DTYPES[name].bytes


def test_every_tensor_of_the_signature_has_a_type_of_the_table() -> None:
    for dtype in PRECISIONS:
        signature = Signature(2, 2, 8, 100, dtype, "append", window=8)
        assert {tensor.dtype for tensor in (*signature.inputs, *signature.outputs)} <= DTYPES.keys()
