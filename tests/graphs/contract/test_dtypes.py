"""Dtypes: the table agrees with each library."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper

from spaceport.graphs.contract.dtypes import DTYPES, NUMPY
from spaceport.graphs.contract.signature import PRECISIONS, Precision, Signature

EACH = pytest.mark.parametrize("name", DTYPES)


@EACH
def test_an_element_has_as_many_bytes_as_in_torch(name: str) -> None:
    assert getattr(torch, name).itemsize == DTYPES[name].bytes


@EACH
def test_the_onnx_element_type_has_the_same_name(name: str) -> None:
    spelled = {"float32": "FLOAT"}.get(name, name.upper())
    assert onnx.TensorProto.DataType.Name(DTYPES[name].onnx) == spelled


@EACH
def test_a_session_reports_its_input_types_with_these_names(name: str) -> None:
    value = helper.make_tensor_value_info("x", DTYPES[name].onnx, ["N"])
    result = helper.make_tensor_value_info("y", DTYPES[name].onnx, ["N"])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].type == f"tensor({DTYPES[name].onnxruntime})"


@EACH
def test_tensorrt_has_a_type_of_this_name_and_size(name: str) -> None:
    api = pytest.importorskip("tensorrt_rtx")
    assert getattr(api.DataType, DTYPES[name].tensorrt).itemsize == DTYPES[name].bytes


@EACH
def test_numpy_has_the_same_type_or_none(name: str) -> None:
    if name == "bfloat16":
        assert name not in NUMPY
    else:
        assert np.dtype(NUMPY[name]) == np.dtype(name) == helper.tensor_dtype_to_np_dtype(DTYPES[name].onnx)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_every_tensor_of_the_signature_has_a_type_of_the_table(dtype: Precision) -> None:
    signature = Signature(2, 2, 8, 100, dtype, "append", window=8)
    assert {tensor.dtype for tensor in (*signature.inputs, *signature.outputs)} <= DTYPES.keys()
