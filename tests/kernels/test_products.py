"""Products, norms, gates, the embedding and the head, against numpy, their functions, and rows against themselves."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.kernels.functions import add_functions
from spaceport.kernels.packing import WEIGHT_FORMATS, QuantizedWeights, gate_order, pack
from support import operator_reference as reference
from support.native_operators import (
    Operator,
    available_sets,
    library,
    model_of,
    normal,
    random_weights,
    require_function_near,
    run,
)

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

EXACT = 2e-6  # of the largest output: float32 sums against float64
ROUNDED = 2e-3  # the same where a sum of a norm may move a code to its neighbour

# The most rows that a tile of some set holds are 2, 4, 6, 7 and 16; 17 and 37 leave tiles of unequal sizes.
ROWS = (1, 2, 3, 5, 6, 7, 8, 9, 13, 16, 17, 37, 40)


@pytest.fixture
def dice() -> np.random.Generator:
    return np.random.default_rng(7)


def close(got: NDArray[Any], expected: NDArray[Any], tolerance: float) -> bool:
    assert got.shape == expected.shape
    return bool(np.abs(got - expected).max() <= tolerance * np.abs(expected).max())


def same_everywhere(kind: str, inputs: dict[str, Any], attributes: dict[str, Any]) -> NDArray[np.float32]:
    """The output, which all sets of this processor compute to the bit, with one thread and two, and its function nearly."""
    outputs = {name: run(kind, inputs, attributes, set_name=name)[0] for name in available_sets()}
    outputs["two threads"] = run(kind, inputs, attributes, threads=2)[0]
    first = outputs["portable"]
    for name, output in outputs.items():
        assert output.tobytes() == first.tobytes(), name
    require_function_near(kind, inputs, attributes)
    return first


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
def test_add_product_is_the_product_with_rounded_rows_on_all_sets(
    dice: np.random.Generator, format_name: str, rows: int
) -> None:
    outputs, inputs = 75, 512  # the last panel has 11 outputs
    weights = random_weights(dice, format_name, outputs, inputs)
    x, residual, bias = normal(dice, rows, inputs), normal(dice, rows, outputs), normal(dice, outputs)
    feeds = {"x": x, "residual": residual, "weights": pack(weights), "bias": bias}
    got = same_everywhere("AddProduct", feeds, {"format": format_name, "width": outputs})
    assert close(got, reference.product(x, weights, bias) + residual, EXACT)


@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
def test_a_row_has_the_same_bytes_in_any_company(dice: np.random.Generator, format_name: str) -> None:
    outputs, inputs = 64, 256
    x, residual = normal(dice, 37, inputs), normal(dice, 37, outputs)
    feeds = {"x": x, "residual": residual, "weights": pack(random_weights(dice, format_name, outputs, inputs))}
    for set_name in available_sets():
        operator = Operator("AddProduct", feeds, {"format": format_name, "width": outputs}, set_name, 2)
        alone = np.concatenate(
            [operator(feeds | {"x": x[i : i + 1], "residual": residual[i : i + 1]})[0] for i in range(37)]
        )
        for count in (*range(2, 18), 24, 33, 36, 37):
            first = 37 - count
            got = operator(feeds | {"x": x[first:], "residual": residual[first:]})[0]
            assert got.tobytes() == alone[first:].tobytes(), (set_name, count)


def test_large_products_are_the_same_with_two_threads(dice: np.random.Generator) -> None:
    weights = random_weights(dice, "int4", 4096, 512)
    for rows in (1, 40):
        x, residual = normal(dice, rows, 512), np.zeros((rows, 4096), np.float32)
        feeds = {"x": x, "residual": residual, "weights": pack(weights)}
        one, two = (run("AddProduct", feeds, {"format": "int4", "width": 4096}, threads=n)[0] for n in (1, 2))
        assert one.tobytes() == two.tobytes()
        assert close(one, reference.product(x, weights), EXACT)


@pytest.mark.parametrize("inputs", [5120, 8192])  # 160 blocks are the most that are unpacked for several tiles
@pytest.mark.parametrize("format_name", ["int4", "int4_pair", "int5", "int8"])
def test_rows_that_do_not_fit_into_the_cache_have_the_bytes_of_rows_alone(
    dice: np.random.Generator, format_name: str, inputs: int
) -> None:
    """Codes of 400 or 640 KB, which the kernels take in parts."""
    rows = 80
    x, residual = normal(dice, rows, inputs), normal(dice, rows, 40)
    weights = random_weights(dice, format_name, 40, inputs)
    feeds = {"x": x, "residual": residual, "weights": pack(weights)}
    for set_name in available_sets():
        operator = Operator("AddProduct", feeds, {"format": format_name, "width": 40}, set_name, 2)
        got = operator(feeds)[0]
        alone = [operator(feeds | {"x": x[i : i + 1], "residual": residual[i : i + 1]})[0] for i in range(rows)]
        assert got.tobytes() == np.concatenate(alone).tobytes(), set_name
    assert close(got, reference.product(x, weights) + residual, EXACT)


def test_extreme_codes_do_not_overflow(dice: np.random.Generator) -> None:
    """All products of bytes at their largest, of equal and of opposite sign."""
    inputs = 256
    x = np.ones((9, inputs), np.float32)
    x[1::3] = -1
    x[2::3, ::2] = -1
    for format_name, code in (("int4", 15), ("int5", 31), ("int5", 0), ("int5_min", 31), ("int8", 255), ("int8", 0)):
        weight_format = WEIGHT_FORMATS[format_name]
        ones = np.ones((32, inputs // 32), np.float16)
        minima = ones if weight_format.has_minima else None
        weights = QuantizedWeights(weight_format, np.full((32, inputs), code, np.uint8), ones, minima)
        feeds = {"x": x, "residual": np.zeros((9, 32), np.float32), "weights": pack(weights)}
        got = same_everywhere("AddProduct", feeds, {"format": format_name, "width": 32})
        assert close(got, reference.product(x, weights), EXACT)


@pytest.mark.parametrize("code", [0, 15])
@pytest.mark.parametrize("minimum", [-128, 127])
def test_extreme_codes_scales_and_minima_of_pairs_do_not_overflow(code: int, minimum: int) -> None:
    """The sums of both blocks are the largest of either sign, which some sets have in one register."""
    x = np.ones((9, 256), np.float32)
    x[1::4] = -1
    blocks = x.reshape(9, 4, 2, 32)
    blocks[2::4, :, 1], blocks[3::4, :, 0] = -1, -1
    codes, shape = np.full((32, 256), code, np.uint8), (32, 8)
    minima, factors = np.full(shape, minimum, np.int8), np.ones((32, 1), np.float16)
    scales = np.full(shape, 255, np.uint8)
    weights = QuantizedWeights(WEIGHT_FORMATS["int4_pair"], codes, scales, minima, factors)
    feeds = {"x": x, "residual": np.zeros((9, 32), np.float32), "weights": pack(weights)}
    got = same_everywhere("AddProduct", feeds, {"format": "int4_pair", "width": 32})
    assert close(got, reference.product(x, weights), EXACT)


def test_products_beside_one_in_pairs_have_its_rounded_rows(dice: np.random.Generator) -> None:
    pairs, others = random_weights(dice, "int4_pair", 40, 128), random_weights(dice, "int8", 64, 128)
    feeds = {"x": normal(dice, 5, 128), "weights": pack(others), "weights2": pack(pairs)}
    attributes = {"norm": "none", "epsilon": 0.0, "widths": [64, 40], "formats": "int8,int4_pair", "activation": "none"}
    got = same_everywhere("NormProduct", feeds, attributes)
    expected = [reference.product(feeds["x"], each.dequantized(), block=64) for each in (others, pairs)]
    for found, right in zip(np.split(got, [64], axis=1), expected, strict=True):
        assert close(found, right, EXACT)


@pytest.mark.parametrize("rows", [5, 6, 9, 18])  # formats have tiles of other sizes
@pytest.mark.parametrize("kind", ["none", "rms", "layer"])
def test_norm_product_puts_products_of_several_formats_side_by_side(
    dice: np.random.Generator, kind: str, rows: int
) -> None:
    inputs, widths, formats = 512, (64, 40, 32), ("int4", "int8_k16", "int8")
    weights = [random_weights(dice, name, width, inputs) for name, width in zip(formats, widths, strict=True)]
    x, gain, shift = normal(dice, rows, inputs) * 3 + 1, normal(dice, inputs), normal(dice, inputs)
    bias = normal(dice, 40)
    feeds = {"x": x, "gain": gain, "weights": pack(weights[0]), "weights2": pack(weights[1]), "bias2": bias}
    feeds["weights3"] = pack(weights[2])
    if kind == "layer":
        feeds["norm_bias"] = shift
    attributes = {"norm": kind, "epsilon": 0.5, "widths": widths, "formats": ",".join(formats), "activation": "none"}
    got = same_everywhere("NormProduct", feeds, attributes)
    normed = reference.normalized(x, kind, gain, shift if kind == "layer" else None, 0.5)
    dense = np.concatenate([each.dequantized() for each in weights])
    expected = reference.product(normed, dense, np.concatenate([np.zeros(64), bias, np.zeros(32)]))
    assert close(got, expected, EXACT if kind == "none" else ROUNDED)


@pytest.mark.parametrize("activation", ["none", "silu", "gelu", "gelu_tanh"])
def test_norm_product_activates_its_outputs(dice: np.random.Generator, activation: str) -> None:
    weights = random_weights(dice, "int8", 64, 96)
    feeds = {"x": normal(dice, 5, 96) * 4, "weights": pack(weights)}
    attributes = {"norm": "none", "epsilon": 0.0, "widths": [64], "formats": "int8", "activation": activation}
    got = same_everywhere("NormProduct", feeds, attributes)
    assert close(got, reference.activated(reference.product(feeds["x"], weights), activation), EXACT)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gate_product_multiplies_the_activated_gate_by_up(dice: np.random.Generator, activation: str) -> None:
    inputs, width = 512, 48
    weights = random_weights(dice, "int4_k", 2 * width, inputs)
    bias, gain, x = normal(dice, 2 * width), normal(dice, inputs), normal(dice, 7, inputs)
    order = gate_order(width)
    feeds = {"x": x, "gain": gain, "weights": pack(weights), "bias": bias}
    attributes = {"norm": "rms", "epsilon": 1e-6, "format": "int4_k", "width": width, "activation": activation}
    got = same_everywhere("GateProduct", feeds, attributes)
    both = np.empty((7, 2 * width))
    both[:, order] = reference.product(reference.normalized(x, "rms", gain, None, 1e-6), weights, bias)
    assert close(got, reference.activated(both[:, :width], activation) * both[:, width:], ROUNDED)


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize(("rows", "chosen"), [([[5, 0, 3]], [5, 0, 3]), ([[2], [0]], [2, 3])])  # of 1 and 2 requests
def test_head_gives_the_logits_of_chosen_rows(
    dice: np.random.Generator, rows: list[list[int]], chosen: list[int], cap: float
) -> None:
    weights, gain, x = random_weights(dice, "int8", 100, 96), normal(dice, 96), normal(dice, 6, 96)
    feeds = {"x": x, "rows": np.array(rows), "gain": gain, "weights": pack(weights)}
    attributes = {"norm": "rms", "epsilon": 1e-6, "format": "int8", "vocabulary": 100, "cap": cap}
    got = same_everywhere("Head", feeds, attributes)
    logits = reference.product(reference.normalized(x[chosen], "rms", gain, None, 1e-6), weights)
    assert got.shape == (*np.shape(rows), 100)
    assert close(got.reshape(-1, 100), cap * np.tanh(logits / cap) if cap else logits, ROUNDED)


@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
def test_embed_gives_the_weights_of_a_token(dice: np.random.Generator, format_name: str) -> None:
    weights = random_weights(dice, format_name, 100, 512)
    feeds = {"ids": np.array([[99, 0, 33, 64]]), "weights": pack(weights)}
    attributes = {"format": format_name, "vocabulary": 100, "width": 512, "scale": 1.0}
    got = same_everywhere("Embed", feeds, attributes)
    assert np.array_equal(got, weights.dequantized()[[99, 0, 33, 64]])
    assert np.array_equal(run("Embed", feeds, attributes | {"scale": 3.0})[0], got * np.float32(3))


def test_rows_of_zeros_and_denormals_give_zeros(dice: np.random.Generator) -> None:
    weights = random_weights(dice, "int4", 32, 64)
    x = np.zeros((3, 64), np.float32)
    x[1] = 1e-40
    feeds = {"x": x, "residual": np.zeros((3, 32), np.float32), "weights": pack(weights)}
    assert not same_everywhere("AddProduct", feeds, {"format": "int4", "width": 32}).any()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("activation", ["none", "silu", "gelu", "gelu_tanh"])
def test_a_row_that_is_not_finite_gives_no_finite_number_and_spoils_no_other(
    dice: np.random.Generator, activation: str, value: float
) -> None:
    """In any of its blocks, lanes and places, also where it is cut off by a cap; the runtime looks for NaN in logits."""
    weights = {name: random_weights(dice, name, 64, 256) for name in WEIGHT_FORMATS}
    x = normal(dice, 9, 256)
    bad = x.copy()
    for row, column in ((1, 0), (2, 37), (5, 255), (6, 31), (8, 144)):
        bad[row, column] = value
    finite = [0, 3, 4, 7]
    for name, matrix in weights.items():
        packed = pack(matrix)
        several = {"widths": [64], "formats": name, "activation": activation}
        for kind, more, attributes in (
            ("NormProduct", {}, several | {"norm": "none", "epsilon": 0.0}),
            ("NormProduct", {}, several | {"norm": "rms", "epsilon": 1e-6}),
            (
                "GateProduct",
                {},
                {"norm": "layer", "epsilon": 1e-6, "format": name, "width": 32, "activation": activation},
            ),
            (
                "Head",
                {"rows": np.arange(9)[None]},
                {"norm": "none", "epsilon": 0.0, "format": name, "vocabulary": 64, "cap": 9.0},
            ),
        ):
            if name == "int4":
                require_function_near(kind, {"x": bad, "weights": packed} | more, attributes)
            for set_name in available_sets():
                operator = Operator(kind, {"x": x, "weights": packed} | more, attributes, set_name)
                good, got = (operator({"x": given, "weights": packed} | more)[0].reshape(9, -1) for given in (x, bad))
                assert np.isnan(got[[1, 2, 5, 6, 8]]).all(), (kind, name, set_name)
                assert got[finite].tobytes() == good[finite].tobytes(), (kind, name, set_name)


def test_each_kind_of_node_has_one_function(dice: np.random.Generator) -> None:
    weights = pack(random_weights(dice, "int4", 64, 64))
    feeds = {"x": normal(dice, 2, 64), "residual": normal(dice, 2, 64), "weights": weights}
    model = model_of("AddProduct", feeds, {"format": "int4", "width": 64})
    node = model.graph.node[0]
    for bias in ("", "bias"):
        copy = model.graph.node.add()
        copy.CopyFrom(node)
        copy.input[:] = ["y", "residual", "weights", bias]
    add_functions(model)
    assert [each.overload for each in model.graph.node] == ["0", "0", "1"]
    assert [each.overload for each in model.functions] == ["0", "1"]
