"""Inputs and attributes that do not fit together end in an error that says so, and damaged ones never in a crash."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from spaceport.kernels.packing import pack, quantize
from support.native_operators import library, run
from support.paths import ROOT

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

Feeds = dict[str, NDArray[Any]]

ZEROS = np.zeros((64, 96), np.float32)
WEIGHTS = pack(quantize(ZEROS + 1, "int4"))
X, RESIDUAL = np.ones((3, 96), np.float32), np.ones((3, 64), np.float32)
ADD = {"x": X, "residual": RESIDUAL, "weights": WEIGHTS}
NORM = {"norm": "rms", "epsilon": 1e-6}
ADD_AS = {"format": "int4", "width": 64}
EMBED_AS = {"format": "int4", "vocabulary": 64, "width": 96, "scale": 1.0}
HEAD_AS = NORM | {"format": "int4", "vocabulary": 64, "cap": 0.0}
GATE_AS = NORM | {"format": "int4", "width": 32, "activation": "silu"}
MANY_AS = NORM | {"widths": [64], "formats": "int4", "activation": "none"}
ATTEND_AS = {"heads": 4, "interleaved": 0, "scale": 0.1, "cap": 0.0, "epsilon": 1e-6}
CACHE = np.zeros((1, 2, 20, 16), np.int8)
ATTEND = {
    "qkv": np.zeros((3, 8 * 16), np.float32),
    "cos": np.zeros((3, 8), np.float32),
    "sin": np.zeros((3, 8), np.float32),
    "slots": np.arange(3)[None],
    "visible": np.ones((1, 1, 3, 20), bool),
    "keys": CACHE,
    "values": CACHE,
    "scales": np.zeros((1, 4, 20), np.float32),
}

# Operator, inputs, attributes, what the error says.
CASES: list[tuple[str, Feeds, dict[str, Any], str]] = [
    ("AddProduct", ADD | {"x": X[:0], "residual": RESIDUAL[:0]}, ADD_AS, "expected at least one row"),
    ("AddProduct", ADD | {"x": X[:, :95]}, ADD_AS, "multiple of 32"),
    ("AddProduct", ADD | {"x": X[:, :64]}, ADD_AS, "bytes, expected 2560"),
    ("AddProduct", ADD | {"x": X[0]}, ADD_AS, "1 dimensions"),
    ("AddProduct", ADD | {"residual": RESIDUAL[:2]}, ADD_AS, "input residual has 128 numbers"),
    ("AddProduct", ADD | {"residual": RESIDUAL.reshape(6, 32)}, ADD_AS, "rows of 32"),
    ("AddProduct", ADD | {"weights": WEIGHTS[:-1]}, ADD_AS, "has 3839 bytes, expected 3840 for 64 x 96"),
    ("AddProduct", ADD | {"bias": np.ones(63, np.float32)}, ADD_AS, "63 numbers, expected 64"),
    ("AddProduct", ADD, ADD_AS | {"format": "int8"}, "as int8"),
    ("AddProduct", ADD, ADD_AS | {"format": "int3"}, "format is int3, expected one of int4, int4_k, int4_pair, int5"),
    ("AddProduct", ADD, ADD_AS | {"format": "int4_k"}, "multiple of 256"),
    ("AddProduct", ADD, ADD_AS | {"format": "int4_pair"}, "96 numbers, expected a multiple of 64"),
    ("AddProduct", ADD, ADD_AS | {"width": 0}, "width is 0"),
    ("AddProduct", ADD, ADD_AS | {"width": 1 << 40}, "expected 1 to 16777216"),
    ("AddProduct", ADD, {"width": 64}, "format"),
    ("NormProduct", {"x": X, "weights": WEIGHTS}, MANY_AS | {"norm": "batch"}, "norm is batch"),
    ("NormProduct", {"x": X, "weights": WEIGHTS}, MANY_AS | {"formats": "int4,int4"}, "expected 1 names"),
    ("NormProduct", {"x": X, "weights": WEIGHTS}, MANY_AS | {"widths": [64, 64], "formats": "int4,int4"}, "weights2"),
    ("NormProduct", {"x": X, "weights": WEIGHTS}, MANY_AS | {"widths": [64] * 4}, "4 sizes"),
    ("NormProduct", {"x": X, "weights": WEIGHTS}, MANY_AS | {"widths": [64] * 17}, "large enough"),
    ("NormProduct", {"x": X, "weights": WEIGHTS, "gain": X[0, :95]}, MANY_AS, "95 numbers, expected 96"),
    ("NormProduct", {"x": X, "weights": WEIGHTS}, MANY_AS | {"epsilon": float("nan")}, "epsilon is not finite"),
    ("NormProduct", {"x": X, "weights": WEIGHTS}, MANY_AS | {"formats": "int4" * 100}, "large enough"),
    ("GateProduct", {"x": X, "weights": WEIGHTS}, GATE_AS | {"width": 24}, "multiple of 16"),
    ("GateProduct", {"x": X, "weights": WEIGHTS}, GATE_AS | {"width": 48}, "expected 5760"),
    ("GateProduct", {"x": X}, GATE_AS, "has 0 bytes"),
    ("Embed", {"ids": np.array([[64]]), "weights": WEIGHTS}, EMBED_AS, "token 64, expected 0 to 63"),
    ("Embed", {"ids": np.array([[-1]]), "weights": WEIGHTS}, EMBED_AS, "token -1"),
    ("Embed", {"ids": np.zeros((1, 0), np.int64), "weights": WEIGHTS}, EMBED_AS, "no token"),
    ("Embed", {"ids": np.array([[0]]), "weights": WEIGHTS}, EMBED_AS | {"width": 128}, "expected 5120"),
    ("Head", {"x": X, "rows": np.array([[3]]), "weights": WEIGHTS}, HEAD_AS, "row 3, expected 0 to 2"),
    ("Head", {"x": X, "rows": np.array([[-1]]), "weights": WEIGHTS}, HEAD_AS, "row -1"),
    ("Head", {"x": X, "rows": np.zeros((1, 0), np.int64), "weights": WEIGHTS}, HEAD_AS, "rows has 0"),
    ("Head", {"x": X, "rows": np.array([[0], [0]]), "weights": WEIGHTS}, HEAD_AS, "3 rows of 2 requests"),
    ("Head", {"x": X, "rows": np.array([[0], [1], [0]]), "weights": WEIGHTS}, HEAD_AS, "row 1, expected 0 to 0"),
    ("Head", {"x": X, "rows": np.array([[0] * 4]), "weights": WEIGHTS}, HEAD_AS, "rows has 4"),
    ("Attend", ATTEND | {"slots": np.array([[0, 1, 20]])}, ATTEND_AS, "slot 20, expected 0 to 19"),
    ("Attend", ATTEND | {"slots": np.array([[0, -1, 2]])}, ATTEND_AS, "slot -1"),
    ("Attend", ATTEND | {"slots": np.array([[0, 1]])}, ATTEND_AS, "slots has 2, expected 3"),
    ("Attend", ATTEND | {"visible": np.ones((1, 1, 3, 21), bool)}, ATTEND_AS, "rows of 21 slots, expected 1 to 20"),
    ("Attend", ATTEND | {"visible": np.ones((1, 1, 3, 0), bool)}, ATTEND_AS, "rows of 0 slots"),
    ("Attend", ATTEND | {"visible": np.ones((1, 1, 2, 20), bool)}, ATTEND_AS, "40 marks"),
    ("Attend", ATTEND | {"visible": np.ones((1, 2, 3, 20), bool)}, ATTEND_AS, "120 marks"),
    ("Attend", ATTEND | {"keys": CACHE.reshape(2, 1, 20, 16)}, ATTEND_AS, "3 rows of 2 requests"),
    ("Attend", ATTEND | {"keys": CACHE[0]}, ATTEND_AS, "keys has 3 dimensions"),
    ("Attend", ATTEND | {"keys": CACHE[:, :, :0]}, ATTEND_AS, "keys has 4 dimensions and 0 bytes"),
    ("Attend", ATTEND | {"values": CACHE[:, :, :19]}, ATTEND_AS, "expected the shape of keys"),
    ("Attend", ATTEND | {"scales": np.zeros((1, 4, 19), np.float32)}, ATTEND_AS, "scales has 76"),
    ("Attend", ATTEND | {"scales": np.zeros((1, 20, 4), np.float32)}, ATTEND_AS, "rows of 4"),
    ("Attend", ATTEND | {"qkv": np.zeros((3, 96), np.float32)}, ATTEND_AS, "rows of 96, expected 128"),
    ("Attend", ATTEND | {"qkv": np.zeros((0, 128), np.float32)}, ATTEND_AS, "at least one row"),
    ("Attend", ATTEND | dict.fromkeys(("cos", "sin"), np.zeros((3, 9), np.float32)), ATTEND_AS, "rows of 9"),
    ("Attend", ATTEND | {"sin": np.zeros((2, 8), np.float32)}, ATTEND_AS, "cos and sin have 24 and 16"),
    ("Attend", ATTEND, ATTEND_AS | {"heads": 3}, "3 query heads for 2 KV heads"),
    ("Attend", ATTEND, ATTEND_AS | {"heads": 1 << 20}, "heads is 1048576"),
    ("Attend", ATTEND | {"q_gain": np.zeros(15, np.float32)}, ATTEND_AS, "15 numbers, expected 16"),
    ("Attend", ATTEND | {"sinks": np.zeros(3, np.float32)}, ATTEND_AS, "3 numbers, expected 4"),
]


@pytest.mark.parametrize(("kind", "feeds", "attributes", "says"), CASES)
def test_hostile_inputs_end_in_an_error(kind: str, feeds: Feeds, attributes: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception, match=says) as caught:
        run(kind, feeds, attributes)
    assert type(caught.value).__module__.startswith("onnxruntime")


@pytest.mark.parametrize("size", [4, 12, 264])
def test_head_sizes_that_no_kernel_has_end_in_an_error(size: int) -> None:
    cache = np.zeros((1, 2, 20, size), np.int8)
    feeds = ATTEND | {"keys": cache, "values": cache, "qkv": np.zeros((3, 8 * size), np.float32)}
    with pytest.raises(InvalidArgument, match=f"head size {size}, expected a multiple of 8 up to 256"):
        run("Attend", feeds, ATTEND_AS)


def test_the_smallest_inputs_are_no_error() -> None:
    """The cases above differ from these in one thing each."""
    run("AddProduct", ADD, ADD_AS)
    run("NormProduct", {"x": X, "weights": WEIGHTS}, MANY_AS)
    run("GateProduct", {"x": X, "weights": WEIGHTS}, GATE_AS)
    run("Embed", {"ids": np.array([[63]]), "weights": WEIGHTS}, EMBED_AS)
    run("Head", {"x": X, "rows": np.array([[2]]), "weights": WEIGHTS}, HEAD_AS)
    run("Attend", ATTEND, ATTEND_AS)


@pytest.mark.parametrize("count", [500, pytest.param(5000, marks=pytest.mark.nightly)])
def test_no_damage_of_one_input_ends_the_process(count: int) -> None:
    command = [sys.executable, "-m", "support.damaged_inputs", "0", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "tests")
    *_, last = done.stdout.splitlines() or [""]
    assert done.returncode == 0, f"{last}\n{done.stderr[-4000:]}"
    assert "errors" in last
    assert "outputs" in last
