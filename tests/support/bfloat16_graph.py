"""Bfloat16 graph: the same graph in float32, since ONNX Runtime's CPU backend has no bfloat16 products."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from spaceport.exporter.bundle_files import write_manifest
from spaceport.graphs.contract.manifest import MANIFEST_FILE, MODEL_FILE
from spaceport.runtime.bundle import read_manifest

HALF, FULL = TensorProto.BFLOAT16, TensorProto.FLOAT


def in_float32(bundle: Path, target: Path) -> Path:
    """A copy of a bfloat16 bundle whose graph has the same nodes and the same values of constants, all in float32."""
    shutil.copytree(bundle, target, ignore=shutil.ignore_patterns(MANIFEST_FILE, f"{MODEL_FILE}*"))
    model = onnx.load(str(bundle / MODEL_FILE))
    for tensor in model.graph.initializer:
        widen(tensor)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == HALF:
            value.type.tensor_type.elem_type = FULL
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                widen(attribute.t)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == HALF:
                attribute.i = FULL
    onnx.save(model, str(target / MODEL_FILE))
    manifest = read_manifest(bundle)
    write_manifest(target, replace(manifest, signature=replace(manifest.signature, dtype="float32")))
    return target


def widen(tensor: TensorProto) -> None:
    """The same numbers in float32, which represents every bfloat16."""
    if tensor.data_type == HALF:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
