"""Matrix products of the bundle formats on this CPU: their session options, and their measured speed and exactness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from spaceport.graphs.contract.signature import Activations, Weights

# Without VNNI, the default kernels of x86 CPUs add two products in 16 bits, where large sums saturate. This session option
# selects other kernels: on AVX2 CPUs they take 1.5 times as long for one row and 1.07 times for 36. With VNNI, where no
# product needs them, they take 2.3 times as long for nine rows.
EXACT_SETTING = ("session.x64quantprecision", "1")

# How products with quantized weights are computed. Level 4 quantizes their inputs to int8, so drafts are exact as chains
# only (see Manifest.exact_drafts); level 1 does not. With float8, which is unpacked in every step, a step of
# one row takes seven times as long as in float32 (107M model).
_SETTINGS: dict[tuple[Weights, Activations], tuple[str, str]] = {
    ("int4", "float"): ("session.qdq_matmulnbits_accuracy_level", "1"),
    ("int4", "int8"): ("session.qdq_matmulnbits_accuracy_level", "4"),
    ("int8", "float"): ("session.disable_quant_qdq", "1"),
    ("float8", "float"): ("session.disable_quant_qdq", "1"),
}

INPUTS, OUTPUTS, WEIGHT = 64, 32, 127  # of the product whose exactness is tested
_LARGEST = 255

ROWS = (1, 4, 9, 36)  # of the timed products
_WIDTHS = (2, 3, 8, 9, 33)  # of the compared ones
_INPUTS, _OUTPUTS, _BLOCK = 768, 2304, 16  # a layer of a model of about 100 million weights; blocks of int4 weights
_ROUNDS = 9

_ONNX_TYPES = {np.dtype(np.float32): 1, np.dtype(np.uint8): 2, np.dtype(np.int8): 3, np.dtype(np.float16): 10}
_OPSET, _IR_VERSION, _INTEGER = 21, 10, 2


@dataclass(frozen=True)
class Product:
    """The product of one format: `--weights`, with its default activations or others."""

    format: str
    weights: Weights
    activations: Activations
    limbs: int = 1  # 8-bit numbers that represent an activation, each in a row of its own

    @property
    def dtype(self) -> type:
        """Type of the product's inputs."""
        if self.format == "float16":
            return np.float16
        return np.uint8 if self.weights == "int8" else np.float32


@dataclass(frozen=True)
class ProductCost:
    """A product's measurements."""

    format: str
    milliseconds: tuple[float, ...]  # for ROWS; minima
    noise: float  # largest change of a row with the number of rows, relative to its largest output; 0 = bit-identical

    @property
    def rows(self) -> str:
        """Whether rows depend on the number of rows, in words."""
        return f"change by {self.noise:.0e}" if self.noise else "bit-identical"


PRODUCTS = (
    Product("float32", "same", "float"),
    Product("float16", "same", "float"),
    Product("int8", "int8", "int8x2", limbs=2),
    Product("int8, one limb", "int8", "int8"),
    Product("int4", "int4", "int8"),
)


@cache
def is_exact(setting: bool) -> bool:
    """Whether sums of the largest products are exact, in a session with or without the setting."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if setting:
        options.add_session_config_entry(*EXACT_SETTING)
    session = ort.InferenceSession(_largest_products(), options, providers=["CPUExecutionProvider"])
    for rows in (1, 2, 33):  # kernels differ by the number of rows
        (sums,) = session.run(None, {"a": np.full((rows, INPUTS), _LARGEST, np.uint8)})
        if not np.array_equal(sums, np.full((rows, OUTPUTS), float(INPUTS * _LARGEST * WEIGHT), np.float32)):
            return False
    return True


def session_options(threads: int, weights: Weights, activations: Activations = "float") -> ort.SessionOptions:
    """Session options for shapes that change from step to step, without onnxruntime's own log output."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.enable_mem_pattern = False
    if (setting := _SETTINGS.get((weights, activations))) is not None:
        options.add_session_config_entry(*setting)
    if weights == "int8" and activations != "float" and not is_exact(setting=False):
        options.add_session_config_entry(*EXACT_SETTING)
    return options


def measure_products(clock: Callable[[], float] = perf_counter) -> list[ProductCost]:
    """The costs of the products of all formats on one thread; they alternate, so that a busy machine affects all alike."""
    dice = np.random.default_rng(0)
    sessions = {product: open_product(product, dice) for product in PRODUCTS}
    inputs = {product: _activations(product, dice) for product in PRODUCTS}
    seconds: dict[tuple[Product, int], list[float]] = {}
    for _ in range(_ROUNDS):
        for product, session in sessions.items():
            for rows in ROWS:
                fed = inputs[product][: rows * product.limbs]
                session.run(None, {"a": fed})  # the weights are in the cache afterwards
                started = clock()
                session.run(None, {"a": fed})
                seconds.setdefault((product, rows), []).append(clock() - started)
    return [
        ProductCost(
            product.format,
            tuple(1e3 * min(seconds[product, rows]) for rows in ROWS),
            noise(session, inputs[product]),
        )
        for product, session in sessions.items()
    ]


def noise(session: ort.InferenceSession, rows: NDArray[Any]) -> float:
    """The largest change of a row's outputs with the number of rows, relative to the largest output."""
    largest = 0.0
    for width in _WIDTHS:
        (together,) = session.run(None, {"a": rows[:width]})
        alone = np.concatenate([session.run(None, {"a": rows[row : row + 1]})[0] for row in range(width)])
        if together.tobytes() != alone.tobytes():
            wide = alone.astype(np.float64)
            largest = max(largest, float(np.abs(together - wide).max() / np.abs(wide).max()), 1e-12)
    return largest


def open_product(
    product: Product, dice: np.random.Generator, inputs: int = _INPUTS, outputs: int = _OUTPUTS, block: int = _BLOCK
) -> ort.InferenceSession:
    """A session with a product of random weights, and with the options that a bundle of its format gets."""
    options = session_options(1, product.weights, product.activations)
    weight = dice.standard_normal((inputs, outputs), np.float32) / np.float32(inputs**0.5)
    if product.weights == "same":
        tensors = {"w": weight.astype(product.dtype)}
        content = _model("MatMul", tensors, product.dtype, product.dtype, inputs, outputs)
    elif product.weights == "int8":
        content = _integer_product(np.clip(np.rint(weight * 127 * 3), -127, 127).astype(np.int8), zero=128)
    else:
        level = {"K": inputs, "N": outputs, "bits": 4, "block_size": block, "accuracy_level": 4}
        codes = dice.integers(0, 256, (outputs, inputs // block, block // 2), np.uint8)
        tensors = {"w": codes, "scales": dice.random(outputs * inputs // block, np.float32)}
        content = _model("MatMulNBits", tensors, product.dtype, np.float32, inputs, outputs, **level)
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _largest_products() -> bytes:
    """A model that multiplies rows of 8-bit numbers with a weight whose numbers are all the largest."""
    return _integer_product(np.full((INPUTS, OUTPUTS), WEIGHT, np.int8), zero=0)


def _integer_product(weight: NDArray[np.int8], zero: int) -> bytes:
    """A model of a product of 8-bit integers, whose inputs have this zero point."""
    unit, zero_point = np.array(1, np.float32), np.array(zero, np.uint8)
    tensors: dict[str, NDArray[Any]] = {"w": weight, "a_scale": unit, "w_scale": unit, "zero": zero_point}
    return _model("MatMulIntegerToFloat", tensors, np.uint8, np.float32, *weight.shape)


def _activations(product: Product, dice: np.random.Generator) -> NDArray[Any]:
    """Inputs of as many rows as are used."""
    shape = (max(*ROWS, *_WIDTHS) * product.limbs, _INPUTS)
    if product.dtype is np.uint8:
        return dice.integers(0, 256, shape, np.uint8)
    return dice.standard_normal(shape, np.float32).astype(product.dtype)


def _model(
    kind: str,
    tensors: Mapping[str, NDArray[Any]],
    input_type: type,
    output_type: type,
    inputs: int,
    outputs: int,
    **attributes: int,
) -> bytes:
    """A serialized ONNX model of one node, from rows `a` and these tensors to rows `y`.

    It is written without the package onnx, which only exports need.
    """
    domain = b"" if kind == "MatMul" else b"com.microsoft"
    settings = (
        _field(1, name.encode()) + _field(3, value) + _field(20, _INTEGER) for name, value in attributes.items()
    )
    node = b"".join(
        (
            *(_field(1, name.encode()) for name in ("a", *tensors)),
            _field(2, b"y"),
            _field(4, kind.encode()),
            *(_field(5, setting) for setting in settings),
            _field(7, domain),
        )
    )
    graph = b"".join(
        (
            _field(1, node),
            _field(2, b"g"),
            *(_field(5, _tensor(name, values)) for name, values in tensors.items()),
            _field(11, _rows(b"a", input_type, inputs)),
            _field(12, _rows(b"y", output_type, outputs)),
        )
    )
    versions = (
        _field(8, _field(1, name) + _field(2, number)) for name, number in ((b"", _OPSET), (b"com.microsoft", 1))
    )
    return b"".join((_field(1, _IR_VERSION), _field(7, graph), *versions))


def _tensor(name: str, values: NDArray[Any]) -> bytes:
    sizes = b"".join(_field(1, size) for size in values.shape)
    return sizes + _field(2, _ONNX_TYPES[values.dtype]) + _field(8, name.encode()) + _field(9, values.tobytes())


def _rows(name: bytes, dtype: type, columns: int) -> bytes:
    shape = _field(1, _field(2, b"rows")) + _field(1, _field(1, columns))
    return _field(1, name) + _field(2, _field(1, _field(1, _ONNX_TYPES[np.dtype(dtype)]) + _field(2, shape)))


def _field(number: int, value: int | bytes) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])
