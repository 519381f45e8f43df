"""Dtypes: the table agrees with each library."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper

from spaceport.graphs.contract.signature import DTYPES, NUMPY, PRECISIONS, Signature

EACH = pytest.mark.parametrize("name", DTYPES)


@EACH
def test_torch_onnx_and_numpy_have_a_type_of_this_name_and_size(name: str) -> None:
    assert getattr(torch, name).itemsize == DTYPES[name].bytes
    spelled = {"float32": "FLOAT"}.get(name, name.upper())
    assert onnx.TensorProto.DataType.Name(DTYPES[name].onnx) == spelled
    if name == "bfloat16":
        assert name not in NUMPY
    else:
        assert np.dtype(NUMPY[name]) == np.dtype(name) == helper.tensor_dtype_to_np_dtype(DTYPES[name].onnx)


@EACH
def test_a_session_reports_its_input_types_with_these_names(name: str) -> None:
    value, result = (helper.make_tensor_value_info(one, DTYPES[name].onnx, ["N"]) for one in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].type == f"tensor({DTYPES[name].onnxruntime})"


@EACH
def test_tensorrt_has_a_type_of_this_name_and_size(name: str) -> None:
    api = pytest.importorskip("tensorrt_rtx")
    assert getattr(api.DataType, DTYPES[name].tensorrt).itemsize == DTYPES[name].bytes


def test_every_tensor_of_the_signature_has_a_type_of_the_table() -> None:
    for dtype in PRECISIONS:
        signature = Signature(2, 2, 8, 100, dtype, "append", window=8)
        assert {tensor.dtype for tensor in (*signature.inputs, *signature.outputs)} <= DTYPES.keys()
