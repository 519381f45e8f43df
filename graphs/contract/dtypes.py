"""Dtypes: the tensor types of the graph contract, and what each library calls them.

The names of the table are those of torch: `getattr(torch, name)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Dtype:
    """A tensor type."""

    bytes: int  # of one element
    onnx: int  # element type number: onnx.TensorProto.DataType
    onnxruntime: str  # T in "tensor(T)", the type of session inputs and outputs
    tensorrt: str  # member of tensorrt.DataType


DTYPES = {
    "float32": Dtype(4, 1, "float", "FLOAT"),
    "float16": Dtype(2, 10, "float16", "HALF"),
    "bfloat16": Dtype(2, 16, "bfloat16", "BF16"),
    "int64": Dtype(8, 7, "int64", "INT64"),
    "int8": Dtype(1, 3, "int8", "INT8"),
    "bool": Dtype(1, 9, "bool", "BOOL"),
}

# numpy has no bfloat16.
NUMPY: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "int64": np.int64,
    "int8": np.int8,
    "bool": np.bool_,
}
