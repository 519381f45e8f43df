"""Integer graphs: int8 matmuls of small graphs, compared with matmuls of fake-quantized values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from spaceport.exporter.integer_matmuls import store_integer_matmuls
from spaceport.exporter.quantized_weights import WeightNotFound
from spaceport.graphs.int8 import InputScale, IntegerLinear, IntegerModel, LinearScales, fake_quantize, quantize_linear
from spaceport.runtime.backends.on_onnxruntime import session_options
from support.small_graphs import Array, Sizes, changed, model_of, op, operators, outputs_of

Products = Mapping[str, IntegerLinear]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def product(seed: int, inputs: int, outputs: int, bound: float | None, moved: bool) -> IntegerLinear:
    move = torch.rand(inputs, generator=seeded(seed)) + 0.5 if moved else None
    return quantize_linear(torch.randn(outputs, inputs, generator=seeded(seed)), LinearScales(InputScale(bound, move)))


def stored(products: Products, shape: Sizes, limbs: int, inputs: Mapping[str, str]) -> onnx.ModelProto:
    """A graph with an int8 matmul and an output for each layer, on the input with the given name."""
    nodes = [op("MatMul", [inputs[name], f"{name}.weight"], [f"{name}.out"]) for name in products]
    outputs = {f"{name}.out": [*shape, product.codes.shape[1]] for name, product in products.items()}
    given = {inputs[name]: [*shape, product.codes.shape[0]] for name, product in products.items()}
    weights = {f"{name}.weight": product.dequantized.numpy() for name, product in products.items()}
    return integers(model_of(nodes, given, outputs, weights), IntegerModel(limbs, products))


def integers(plain: onnx.ModelProto, products: IntegerModel) -> onnx.ModelProto:
    """The graph with integer products, which are operators of ONNX Runtime."""
    return changed(plain, lambda model: store_integer_matmuls(model, products), check=False)[1]


def expected_of(product: IntegerLinear, states: Tensor, limbs: int) -> Array:
    values: Array = (fake_quantize(states, product.input, limbs)[0] @ product.dequantized).numpy()
    return values


def compare(products: Products, shape: tuple[int, ...], limbs: int, inputs: Mapping[str, str]) -> None:
    """Compare each matmul with the reference; row sizes differ by factors of 1000, so that dynamic scales matter."""
    widths = {inputs[name]: product.codes.shape[0] for name, product in products.items()}
    sizes = torch.logspace(-2, 1, shape[-1])[:, None]
    states = {name: torch.randn((*shape, size), generator=seeded(9)) * sizes for name, size in widths.items()}
    model = stored(products, ["B", "T"][-len(shape) :], limbs, inputs)
    arrays = {name: values.numpy() for name, values in states.items()}
    found = outputs_of(model, arrays, session_options(1, "int8", "int8x2"))
    for got, (name, product) in zip(found, products.items(), strict=True):
        expected = expected_of(product, states[inputs[name]], limbs)
        for row, other in zip(got.reshape(-1, got.shape[-1]), expected.reshape(-1, got.shape[-1]), strict=True):
            # values between two steps of the low limb may be rounded up or down
            assert np.abs(row - other).max() <= 2e-4 * max(np.abs(other).max(), (product.input.clip or 0) / 10)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(("limbs", "bound"), [(2, None), (2, 6.0), (1, None)])
@pytest.mark.parametrize("shape", [(7,), (3, 7)])
def test_int8_matmuls_equal_matmuls_of_the_dequantized_values(
    shape: tuple[int, ...], limbs: int, bound: float | None, moved: bool
) -> None:
    """Two layers of different sizes that share their input, and one with its own input."""
    first = product(1, 24, 40, bound, moved)
    second = quantize_linear(torch.randn(9, 24, generator=seeded(2)), LinearScales(first.input))
    products = {"query": first, "key": second, "down": product(3, 16, 8, bound, moved)}
    compare(products, shape, limbs, {"query": "states", "key": "states", "down": "others"})


def test_wide_inputs_have_their_own_smoothing_factors() -> None:
    products = {name: product(seed, 16400, 4, None, True) for seed, name in enumerate(("first", "second"))}
    compare(products, (3,), 2, {"first": "a", "second": "b"})


def repeated() -> dict[str, IntegerLinear]:
    weight = torch.randn(8, 16, generator=seeded(1))
    return {name: quantize_linear(weight, LinearScales(InputScale(bound))) for name, bound in (("0", 4.0), ("1", 60.0))}


def test_equal_weights_of_repeated_layers_keep_their_own_input_scales() -> None:
    compare(repeated(), (3,), 2, {"0": "a", "1": "b"})


def test_more_matmuls_than_modules_with_equal_weights_are_refused() -> None:
    first, second = repeated().values()
    weights = torch.randn(8, 16, generator=seeded(1))
    graph = {"0": first, "1": second, "2": quantize_linear(weights, LinearScales(InputScale(4.0)))}
    nodes = [op("MatMul", ["x", f"w{name}"], [f"y{name}"]) for name in graph]
    constants = {f"w{name}": each.dequantized.numpy() for name, each in graph.items()}
    plain = model_of(nodes, {"x": ["T", 16]}, {f"y{name}": ["T", 8] for name in graph}, constants)
    with pytest.raises(WeightNotFound, match="more matmuls with the weight of 0 than there are modules with this"):
        integers(plain, IntegerModel(2, {"0": first, "1": second}))


@pytest.mark.parametrize("other", ["none", "output", "consumer"])
def test_smoothing_goes_into_the_gain_of_a_norm_only_without_other_use(other: str) -> None:
    own = product(1, 16, 8, 6.0, True)
    gain = torch.rand(16, generator=seeded(4)) + 0.5
    nodes = [
        op("RMSNormalization", ["x", "gain"], ["normed"], axis=-1),
        op("MatMul", ["normed", "weight"], ["y"]),
        op("Neg", ["normed" if other == "consumer" else "x"], ["rest"]),
    ]
    sizes: dict[str, Sizes] = {"y": ["T", 8], "rest": ["T", 16]}
    normed_size: dict[str, Sizes] = {"normed": ["T", 16]}
    read, between = (sizes | normed_size, {}) if other == "output" else (sizes, normed_size)
    constants = {"gain": gain.numpy(), "weight": own.dequantized.numpy()}
    model = integers(model_of(nodes, {"x": ["T", 16]}, read, constants, between), IntegerModel(2, {"y": own}))
    x = torch.randn(5, 16, generator=seeded(5))
    outputs = outputs_of(model, {"x": x.numpy()}, session_options(1, "int8", "int8x2"))
    found = dict(zip(read, outputs, strict=True))
    normed = x * (x.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt() * gain
    assert np.abs(found["y"] - expected_of(own, normed, 2)).max() < 1e-3 * np.abs(found["y"]).max()
    assert np.abs(found["rest"] + (normed if other == "consumer" else x).numpy()).max() < 1e-5
    assert other != "output" or np.abs(found["normed"] - normed.numpy()).max() < 1e-5
    assert operators(model).count("Mul") == (0 if other == "none" else 1)
