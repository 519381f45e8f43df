"""Sessions of one operator, in the compiled library, and inputs for it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from spaceport.kernels.build import SOURCES, build, compiler, library_name
from support.cache import built

SETS = ("portable", "avx2", "avxvnni", "avx512vnni", "neon")
_TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.bool_): TensorProto.BOOL,
}
_OUTPUT_TYPES = {"keys": TensorProto.INT8, "values": TensorProto.INT8}

# Inputs of the operators in the order of the library.
INPUTS = {
    "Embed": ("ids", "weights"),
    "NormProduct": ("x", "gain", "norm_bias", "weights", "bias", "weights2", "bias2", "weights3", "bias3"),
    "AddProduct": ("x", "residual", "weights", "bias"),
    "GateProduct": ("x", "gain", "norm_bias", "weights", "bias"),
    "Head": ("x", "rows", "gain", "norm_bias", "weights", "bias"),
    "Attend": ("qkv", "cos", "sin", "slots", "visible", "keys", "values", "scales", "q_gain", "k_gain", "sinks"),
}


@cache
def library() -> Path | None:
    """The library with all instruction sets that this processor can run, compiled once; None without a compiler."""
    if (given := os.environ.get("TESTED_KERNELS")) is not None:  # for instance, one with sanitizers
        return Path(given)
    if compiler() is None:
        return None
    sources = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])
    folder = built("kernels", sources, ["kernels/build.py"], lambda to: build(to / library_name(), test_encoding=True))
    return folder / library_name()


@contextmanager
def forced(set_name: str | None) -> Iterator[None]:
    """Open sessions with one instruction set inside the block."""
    before = os.environ.pop("SPACEPORT_KERNELS", None)
    if set_name:
        os.environ["SPACEPORT_KERNELS"] = set_name
    try:
        yield
    finally:
        os.environ.pop("SPACEPORT_KERNELS", None)
        if before is not None:
            os.environ["SPACEPORT_KERNELS"] = before


def options(threads: int = 1, with_library: bool = True) -> onnxruntime.SessionOptions:
    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads, chosen.inter_op_num_threads = threads, 1
    chosen.log_severity_level = 4
    if with_library:
        chosen.register_custom_ops_library(str(library()))
    return chosen


@cache
def available_sets() -> tuple[str, ...]:
    """The instruction sets of the library that this processor has."""
    found = []
    for name in SETS:
        with forced(name):
            try:
                options()
            except onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument:
                continue
        found.append(name)
    return tuple(found)


class Operator:
    """One operator in a session of its own; every input is fed, so that nothing is folded or checked too early."""

    def __init__(
        self,
        kind: str,
        inputs: Mapping[str, NDArray[Any]],
        attributes: Mapping[str, Any],
        set_name: str | None = None,
        threads: int = 1,
        constants: tuple[str, ...] = (),
    ) -> None:
        names = [name if name in inputs else "" for name in INPUTS[kind]]
        while not names[-1]:
            names.pop()
        outputs = ("y", "new_keys", "new_values", "new_scales") if kind == "Attend" else ("y",)
        node = helper.make_node(kind, names, outputs, domain="spaceport", **attributes)
        fed = [
            helper.make_tensor_value_info(name, _TYPES[value.dtype], [f"{name}{i}" for i in range(value.ndim)])
            for name, value in inputs.items()
            if name not in constants
        ]
        made = [
            helper.make_tensor(name, _TYPES[inputs[name].dtype], inputs[name].shape, inputs[name].tobytes(), raw=True)
            for name in constants
        ]
        given = [
            helper.make_tensor_value_info(name, _OUTPUT_TYPES.get(name.removeprefix("new_"), TensorProto.FLOAT), None)
            for name in outputs
        ]
        model = helper.make_model(
            helper.make_graph([node], "operator", fed, given, made),
            opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("spaceport", 1)],
            ir_version=10,
        )
        with forced(set_name):
            self.session = onnxruntime.InferenceSession(
                model.SerializeToString(), options(threads), providers=["CPUExecutionProvider"]
            )
        self.constants = constants

    def __call__(self, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        fed = {name: value for name, value in inputs.items() if name not in self.constants}
        return [np.asarray(output) for output in self.session.run(None, fed)]


def run(kind: str, inputs: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any], **how: Any) -> list[NDArray[Any]]:
    """The outputs of an operator for these inputs."""
    return Operator(kind, inputs, attributes, **how)(inputs)
