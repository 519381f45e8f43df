"""The functions of standard ONNX operators, which run without the library, compute what the operators compute."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.kernels.functions import add_functions
from spaceport.kernels.packing import WEIGHT_FORMATS, pack
from support.native_operators import library, model_of, normal, random_weights, session_of
from support.operator_reference import CASES

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

NEAR = 1e-3  # of the largest output


def assert_the_same(kind: str, feeds: dict[str, NDArray[Any]], attributes: dict[str, Any]) -> None:
    """With the library the operator runs, without it the function: two computations, nearly equal results."""
    model = model_of(kind, feeds, attributes)
    operator = session_of(model).run(None, feeds)
    add_functions(model)
    with_library = session_of(model).run(None, feeds)
    function = session_of(model, with_library=False).run(None, feeds)
    assert [each.tobytes() for each in with_library] == [each.tobytes() for each in operator]
    for ours, theirs in zip(operator, function, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        difference = np.abs(ours.astype(np.float64) - theirs)
        if ours.dtype == np.int8:  # a norm's sum in another order may move a code to its neighbour
            assert difference.max() <= 1
            assert (difference > 0).mean() < 1e-3
        else:
            assert difference.max() <= NEAR * np.abs(ours).max()


@pytest.fixture
def dice() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
def test_the_function_of_add_product_is_its_product(dice: np.random.Generator, format_name: str) -> None:
    weights = pack(random_weights(dice, format_name, 75, 512))
    feeds = {"x": normal(dice, 4, 512), "residual": normal(dice, 4, 75), "weights": weights, "bias": normal(dice, 75)}
    feeds["x"][2, 32:64] = 0
    assert_the_same("AddProduct", feeds, {"format": format_name, "width": 75})


@pytest.mark.parametrize("formats", [("int4_k", "int8_k16"), ("int8", "int4_pair")])
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
def test_the_function_of_norm_product_is_its_norm_and_products(
    dice: np.random.Generator, norm: str, formats: tuple[str, str]
) -> None:
    feeds = {"x": normal(dice, 4, 512) + 1, "gain": normal(dice, 512)}
    if norm == "layer":
        feeds["norm_bias"] = normal(dice, 512)
    feeds |= {"weights": pack(random_weights(dice, formats[0], 64, 512)), "bias": normal(dice, 64)}
    feeds |= {"weights2": pack(random_weights(dice, formats[1], 40, 512))}
    attributes = {"norm": norm, "epsilon": 1e-5, "widths": [64, 40], "activation": "gelu"}
    attributes["formats"] = ",".join(formats)
    assert_the_same("NormProduct", feeds, attributes)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_the_function_of_gate_product_is_its_gate(dice: np.random.Generator, activation: str) -> None:
    weights = pack(random_weights(dice, "int4", 96, 64))
    feeds = {"x": normal(dice, 4, 64), "gain": normal(dice, 64), "weights": weights, "bias": normal(dice, 96)}
    attributes = {"norm": "rms", "epsilon": 1e-6, "format": "int4", "width": 48, "activation": activation}
    assert_the_same("GateProduct", feeds, attributes)


@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
def test_the_functions_of_the_first_and_last_operator_share_their_weights(
    dice: np.random.Generator, format_name: str
) -> None:
    weights = pack(random_weights(dice, format_name, 100, 256))
    attributes = {"format": format_name, "vocabulary": 100}
    feeds = {"ids": np.array([[99, 0, 40]]), "weights": weights}
    assert_the_same("Embed", feeds, attributes | {"width": 256, "scale": 2.0})
    feeds = {"x": normal(dice, 3, 256), "rows": np.array([[2, 0]]), "weights": weights, "gain": normal(dice, 256)}
    assert_the_same("Head", feeds, attributes | {"norm": "rms", "epsilon": 1e-6, "cap": 5.0})


@pytest.mark.parametrize("name", [name for name in CASES if name != "many slots"])
def test_the_function_of_attend_is_its_attention(name: str) -> None:
    case = CASES[name]
    assert_the_same("Attend", case.feeds(np.random.default_rng(4)), case.attributes)


def test_the_functions_are_nan_where_the_operators_are(dice: np.random.Generator) -> None:
    weights = pack(random_weights(dice, "int4", 64, 64))
    feeds = {"x": normal(dice, 4, 64), "residual": normal(dice, 4, 64), "weights": weights}
    feeds["x"][1, 40], feeds["x"][3, 0] = np.nan, np.inf
    case = CASES["grouped queries"]
    attended = case.feeds(dice)
    attended["qkv"][3, 64 * 7] = attended["qkv"][1, 0] = np.nan
    attended["qkv"][0, 64 * 8] = np.inf
    for kind, given, attributes in (
        ("AddProduct", feeds, {"format": "int4", "width": 64}),
        ("Attend", attended, case.attributes),
    ):
        model = model_of(kind, given, attributes)
        add_functions(model)
        operator, function = (session_of(model, with_library=with_it).run(None, given) for with_it in (True, False))
        assert np.isnan(operator[0]).any()
        for i in (0, -1):
            assert np.array_equal(np.isnan(operator[i]), np.isnan(function[i]))
        near = np.abs(operator[0] - function[0]) <= NEAR * np.nanmax(np.abs(operator[0]))
        assert (near | np.isnan(operator[0])).all()


def test_the_functions_take_several_requests(dice: np.random.Generator) -> None:
    case = CASES["grouped queries"]
    several = [case.feeds(dice) for _ in range(3)]
    assert_the_same(
        "Attend", {name: np.concatenate([each[name] for each in several]) for name in several[0]}, case.attributes
    )
    weights = pack(random_weights(dice, "int8", 64, 64))
    feeds = {"x": normal(dice, 6, 64), "rows": np.array([[2], [0]]), "weights": weights}
    attributes = {"norm": "none", "epsilon": 0.0, "format": "int8", "vocabulary": 64, "cap": 0.0}
    assert_the_same("Head", feeds, attributes)
    chosen = session_of(model_of("Head", feeds, attributes)).run(None, feeds)[0]
    for request, row in enumerate((2, 3)):
        one = feeds | {"x": feeds["x"][row : row + 1], "rows": np.array([[0]])}
        assert np.array_equal(
            session_of(model_of("Head", one, attributes)).run(None, one)[0], chosen[request : request + 1]
        )


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
