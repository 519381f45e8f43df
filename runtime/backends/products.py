"""Products: the matrix product of each bundle format on this CPU, how long it takes and whether its rows depend on others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from spaceport.graphs.contract.signature import Activations, Weights
from spaceport.runtime.backends.on_onnxruntime import session_options
from spaceport.runtime.backends.small_model import ORT_DOMAIN, model, node

ROWS = (1, 4, 9, 36)  # of the timed products
_WIDTHS = (2, 3, 8, 9, 33)  # of the compared ones
_INPUTS, _OUTPUTS, _BLOCK = 768, 2304, 16  # a layer of a model of about 100 million weights; blocks of int4 weights
_ROUNDS = 9


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
class Cost:
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


def measure(clock: Callable[[], float] = perf_counter) -> list[Cost]:
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
        Cost(
            product.format,
            tuple(1e3 * min(seconds[product, rows]) for rows in ROWS),
            noise(session, inputs[product]),
        )
        for product, session in sessions.items()
    ]


def noise(session: ort.InferenceSession, rows: NDArray[Any]) -> float:
    """The largest change of a row's outputs with the number of rows, relative to the largest output."""
    found = 0.0
    for width in _WIDTHS:
        (together,) = session.run(None, {"a": rows[:width]})
        alone = np.concatenate([session.run(None, {"a": rows[row : row + 1]})[0] for row in range(width)])
        if together.tobytes() != alone.tobytes():
            wide = alone.astype(np.float64)
            found = max(found, float(np.abs(together - wide).max() / np.abs(wide).max()), 1e-12)
    return found


def open_product(
    product: Product, dice: np.random.Generator, inputs: int = _INPUTS, outputs: int = _OUTPUTS, block: int = _BLOCK
) -> ort.InferenceSession:
    """A session with a product of random weights, and with the options that a bundle of its format gets."""
    options = session_options(1, product.weights, product.activations)
    weight = dice.standard_normal((inputs, outputs), np.float32) / np.float32(inputs**0.5)
    if product.weights == "same":
        nodes = [node("MatMul", ("a", "w"), "y")]
        tensors = {"w": weight.astype(product.dtype)}
    elif product.weights == "int8":
        nodes = [node("MatMulIntegerToFloat", ("a", "w", "one", "one", "zero"), "y", domain=ORT_DOMAIN)]
        codes = np.clip(np.rint(weight * 127 * 3), -127, 127).astype(np.int8)
        tensors = {"w": codes, "one": np.array(1, np.float32), "zero": np.array(128, np.uint8)}
    else:
        level = {"K": inputs, "N": outputs, "bits": 4, "block_size": block, "accuracy_level": 4}
        nodes = [node("MatMulNBits", ("a", "w", "scales"), "y", domain=ORT_DOMAIN, **level)]
        codes = dice.integers(0, 256, (outputs, inputs // block, block // 2), np.uint8)
        tensors = {"w": codes, "scales": dice.random(outputs * inputs // block, np.float32)}
    made = np.float16 if product.format == "float16" else np.float32
    content = model(nodes, tensors, ("a", product.dtype, inputs), ("y", made, outputs))
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _activations(product: Product, dice: np.random.Generator) -> NDArray[Any]:
    """Inputs of as many rows as are used."""
    shape = (max(*ROWS, *_WIDTHS) * product.limbs, _INPUTS)
    if product.dtype is np.uint8:
        return dice.integers(0, 256, shape, np.uint8)
    return dice.standard_normal(shape, np.float32).astype(product.dtype)
