"""Sessions of one operator, in the compiled library, and inputs for it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from spaceport.kernels.build import SOURCES, build, compiler, library_name
from spaceport.kernels.functions import INPUTS, OUTPUTS, add_functions
from spaceport.kernels.gguf_weights import GGUF_BLOCKS, from_gguf
from spaceport.kernels.packing import WEIGHT_FORMATS, QuantizedWeights
from spaceport.runtime.backends.machine import instruction_sets
from support.cache import built
from support.paths import TESTS

OPSET, IR_VERSION = 23, 11  # of native graphs
SETS = ("portable", "avx2", "avxvnni", "avx512vnni", "amx", "neon")
EMULATED_MATRICES = TESTS / "kernels" / "emulated_matrices.h"
EMULATION = f'-DSPACEPORT_MATRICES="{EMULATED_MATRICES}"'  # plain C++ in place of the instructions of AMX
_OUTPUT_TYPES = {"new_keys": TensorProto.INT8, "new_values": TensorProto.INT8}

GGUF_TYPES = {weight_format.name: kind for kind, (_, _, weight_format) in GGUF_BLOCKS.items()}  # of int4: with minima


def sources() -> list[Path]:
    """What the library for tests is compiled from."""
    return sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"), EMULATED_MATRICES])


def emulation() -> list[str]:
    """Flags that emulate the instructions that this processor lacks."""
    return [] if "amx_int8" in instruction_sets() else [EMULATION]


@cache
def library() -> Path | None:
    """The library with all instruction sets that this processor can run, compiled once; None without a compiler."""
    if (given := os.environ.get("TESTED_KERNELS")) is not None:  # for instance, one with sanitizers
        return Path(given)
    if compiler() is None:
        return None
    flags = emulation()

    def make(to: Path) -> None:
        build(to / library_name(), flags=flags, test_encoding=True)

    folder = built("kernels", [*sources(), *flags], make, ["kernels/build.py"])
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


def session_of(model: onnx.ModelProto, threads: int = 1, with_library: bool = True) -> onnxruntime.InferenceSession:
    chosen = options(threads, with_library)
    return onnxruntime.InferenceSession(model.SerializeToString(), chosen, providers=["CPUExecutionProvider"])


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


def normal(dice: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return dice.standard_normal(shape, dtype=np.float32)


def random_weights(dice: np.random.Generator, format_name: str, outputs: int, inputs: int) -> QuantizedWeights:
    """Weights of about 0.1 in one of the formats, from the bytes of a GGUF tensor where one has it."""
    if format_name == "int4_pair":
        codes = dice.integers(0, 16, (outputs, inputs), dtype=np.uint8)
        scales, minima = dice.integers(0, 256, (2, outputs, inputs // 32), dtype=np.uint8)
        factors = (0.1 + 0.3 * dice.random((outputs, 1))).astype(np.float16)
        return QuantizedWeights(WEIGHT_FORMATS[format_name], codes, scales, minima.view(np.int8), factors)
    gguf_type = GGUF_TYPES[format_name]
    size, width, _ = GGUF_BLOCKS[gguf_type]
    blocks = dice.integers(0, 256, (outputs * inputs // width, size), dtype=np.uint8)
    for offset in {"Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,)}.get(gguf_type, (0, 2)):
        factors = (0.0005 + 0.001 * dice.random(len(blocks))).astype(np.float16)
        blocks[:, offset : offset + 2] = factors.view(np.uint8).reshape(-1, 2)
    weights = from_gguf(blocks.reshape(-1), gguf_type, outputs, inputs)
    assert weights is not None
    assert weights.format.name == format_name
    return weights


def model_of(
    kind: str, inputs: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any], constants: tuple[str, ...] = ()
) -> onnx.ModelProto:
    """A graph of one operator; every input but the constants is fed, so that nothing is folded or checked too early."""
    names = [name if name in inputs else "" for name in INPUTS[kind]]
    while not names[-1]:
        names.pop()
    node = helper.make_node(kind, names, OUTPUTS[kind], domain="spaceport", **attributes)
    fed = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(value.dtype), [f"{name}{i}" for i in range(value.ndim)]
        )
        for name, value in inputs.items()
        if name not in constants
    ]
    made = [numpy_helper.from_array(inputs[name], name) for name in constants]
    given = [
        helper.make_tensor_value_info(name, _OUTPUT_TYPES.get(name, TensorProto.FLOAT), None) for name in OUTPUTS[kind]
    ]
    return helper.make_model(
        helper.make_graph([node], "operator", fed, given, made),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("spaceport", 1)],
        ir_version=IR_VERSION,
    )


class Operator:
    """One operator in a session of its own."""

    def __init__(
        self,
        kind: str,
        inputs: Mapping[str, NDArray[Any]],
        attributes: Mapping[str, Any],
        set_name: str | None = None,
        threads: int = 1,
        constants: tuple[str, ...] = (),
    ) -> None:
        model = model_of(kind, inputs, attributes, constants)
        with forced(set_name):
            self.session = session_of(model, threads)
        self.constants = constants

    def __call__(self, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        fed = {name: value for name, value in inputs.items() if name not in self.constants}
        return [np.asarray(output) for output in self.session.run(None, fed)]


def run(kind: str, inputs: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any], **how: Any) -> list[NDArray[Any]]:
    """The outputs of an operator for these inputs."""
    return Operator(kind, inputs, attributes, **how)(inputs)


def require_function_near(
    kind: str, feeds: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any], tolerance: float = 1e-3
) -> None:
    """Verify that the function of an operator computes nearly the same without the library, and does not run with it.

    The tolerance is relative to the largest output; undefined numbers are in the same places."""
    model = model_of(kind, feeds, attributes)
    operator = session_of(model).run(None, feeds)
    add_functions(model)
    with_library, function = (session_of(model, with_library=with_it).run(None, feeds) for with_it in (True, False))
    for ours, same, theirs in zip(operator, with_library, function, strict=True):
        assert (ours.tobytes(), ours.shape, ours.dtype) == (same.tobytes(), theirs.shape, theirs.dtype)
        assert np.array_equal(np.isnan(ours), np.isnan(theirs))
        difference = np.abs(np.nan_to_num(ours) - np.nan_to_num(theirs).astype(np.float64))
        if ours.dtype != np.int8:
            assert difference.max() <= tolerance * np.nanmax(np.abs(ours))
        elif not np.isnan(operator[0]).any():  # a norm's sum in another order may move a code to its neighbour
            assert difference.max() <= 1
            assert (difference > 0).mean() < 1e-3
