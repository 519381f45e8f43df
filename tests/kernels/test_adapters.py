"""Low-rank adapters inside the products: they change the rows that they are for, and no bit of the others."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.kernels.packing import QuantizedWeights, gate_order, pack
from support import operator_reference as reference
from support.native_operators import (
    Operator,
    available_sets,
    library,
    normal,
    random_weights,
    require_function_near,
    run,
)

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

Feeds = dict[str, NDArray[Any]]

ROUNDED = 2e-3  # of the largest output: a sum in another order may move a code to its neighbour
INPUTS, ROWS, RANK = 256, 11, 64
ADAPTED = np.array([[7, 2, 10]])  # of rows in two tiles and more on every set

KINDS: dict[str, tuple[int, dict[str, Any]]] = {  # outputs of the products together, attributes
    "NormProduct": (
        64 + 40 + 23,  # products that begin and end within a panel of the adapter
        {
            "norm": "layer",
            "epsilon": 1e-5,
            "widths": [64, 40, 23],
            "formats": "int4,int8_k16,int8",
            "activation": "gelu",
        },
    ),
    "AddProduct": (75, {"format": "int4_k", "width": 75}),
    "GateProduct": (96, {"norm": "rms", "epsilon": 1e-6, "format": "int4", "width": 48, "activation": "silu"}),
}


def feeds_of(kind: str, dice: np.random.Generator) -> tuple[Feeds, dict[str, QuantizedWeights]]:
    """Inputs with an adapter, whose outputs are about as large as those of the product, and their weights."""
    outputs, attributes = KINDS[kind]
    feeds: Feeds = {"x": normal(dice, ROWS, INPUTS) + 1}
    widths, formats = [outputs], [attributes.get("format")]
    if kind == "NormProduct":
        widths, formats = attributes["widths"], attributes["formats"].split(",")
        feeds |= {"gain": normal(dice, INPUTS), "norm_bias": normal(dice, INPUTS)}
    if kind == "AddProduct":
        feeds["residual"] = normal(dice, ROWS, outputs)
    matrices = {
        f"weights{i + 1 if i else ''}": random_weights(dice, format_name, width, INPUTS)
        for i, (width, format_name) in enumerate(zip(widths, formats, strict=True))
    }
    for i, width in enumerate(widths):
        feeds[f"bias{i + 1 if i else ''}"] = normal(dice, width)
    matrices |= {name: random_weights(dice, "int8", *size) for name, size in
                 (("down", (RANK, INPUTS)), ("up", (outputs, RANK)))}  # fmt: skip
    feeds |= {name: pack(matrix) for name, matrix in matrices.items()}
    return feeds | {"adapted": ADAPTED}, matrices


def plain_of(feeds: Feeds) -> Feeds:
    return {name: value for name, value in feeds.items() if name not in ("adapted", "down", "up")}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dice() -> np.random.Generator:
    return np.random.default_rng(13)


def test_adapted_rows_are_the_product_and_the_adapter_before_the_activation(
    dice: np.random.Generator, kind: str
) -> None:
    feeds, matrices = feeds_of(kind, dice)
    attributes = KINDS[kind][1]
    x = reference.normalized(
        feeds["x"],
        attributes.get("norm", "none"),
        feeds.get("gain"),
        feeds.get("norm_bias"),
        attributes.get("epsilon", 0),
    )
    dense = np.concatenate([matrix.dequantized() for name, matrix in matrices.items() if name.startswith("weights")])
    bias = np.concatenate([value for name, value in feeds.items() if name.startswith("bias")])
    y = reference.product(x, dense, bias)
    y[ADAPTED[0]] += reference.adapter(x[ADAPTED[0]], matrices["down"].dequantized(), matrices["up"].dequantized())
    if kind == "NormProduct":
        y = reference.activated(y, "gelu")
    elif kind == "AddProduct":
        y = y + feeds["residual"]
    else:
        both = np.empty_like(y)
        both[:, gate_order(48)] = y
        y = reference.activated(both[:, :48], "silu") * both[:, 48:]
    first = None
    for set_name in available_sets():
        got = run(kind, feeds, attributes | {"rank": RANK}, set_name=set_name, threads=2)[0]
        first = got if first is None else first
        assert got.tobytes() == first.tobytes(), set_name
        assert np.abs(got - y).max() <= ROUNDED * np.abs(y).max()


def test_adapted_rows_have_the_same_bytes_alone_and_in_any_company(dice: np.random.Generator, kind: str) -> None:
    """Alone, with other rows adapted or not, in another order, and named twice."""
    feeds, _ = feeds_of(kind, dice)
    attributes = KINDS[kind][1] | {"rank": RANK}
    by_row = {"x", "residual"} & set(feeds)
    for set_name in available_sets():
        operator = Operator(kind, feeds, attributes, set_name, 2)

        def rows(order: list[int], adapted: list[int], run: Operator = operator) -> NDArray[np.float32]:
            chosen = feeds | {name: feeds[name][order] for name in by_row}
            return np.asarray(run(chosen | {"adapted": np.array([adapted], np.int64)})[0])

        alone = {row: rows([row], [0])[0].tobytes() for row in range(ROWS)}
        plain = rows(list(range(ROWS)), [])
        for order, adapted in (
            (range(ROWS), [2, 7, 10]),
            (range(ROWS), range(ROWS)),
            (range(ROWS), [4, 4, 1, 4, 1]),
            (dice.permutation(ROWS), [0, 9]),
            (dice.permutation(ROWS)[:5], [3]),
        ):
            got = rows(list(order), list(adapted))
            for place, row in enumerate(order):
                expected = alone[row] if place in adapted else plain[row].tobytes()
                assert got[place].tobytes() == expected, (set_name, order, adapted)


def test_no_adapted_row_leaves_all_rows_as_they_are(dice: np.random.Generator, kind: str) -> None:
    feeds, _ = feeds_of(kind, dice)
    attributes = KINDS[kind][1]
    plain = run(kind, plain_of(feeds), attributes)[0]
    for shape in ((1, 0), (0,), (2, 0)):
        none = feeds | {"adapted": np.zeros(shape, np.int64)}
        assert run(kind, none, attributes | {"rank": RANK})[0].tobytes() == plain.tobytes()
    assert run(kind, plain_of(feeds), attributes | {"rank": 0})[0].tobytes() == plain.tobytes()


@pytest.mark.parametrize("adapted", [[[7, 2, 10]], [[3, 3]], [[]]])
def test_the_function_of_a_product_has_its_adapter(dice: np.random.Generator, kind: str, adapted: list[Any]) -> None:
    feeds = feeds_of(kind, dice)[0] | {"adapted": np.array(adapted, np.int64)}
    require_function_near(kind, feeds, KINDS[kind][1] | {"rank": RANK}, ROUNDED)


HOSTILE = [
    ({"adapted": np.array([11])}, {}, "adapted row 11, expected 0 to 10"),
    ({"adapted": np.array([3, -1])}, {}, "adapted row -1"),
    ({"adapted": np.array([1 << 40])}, {}, "adapted row 1099511627776"),
    ({"adapted": np.zeros((1 << 20) + 1, np.int64)}, {}, "1048577 rows, expected at most 1048576"),
    ({"down": np.zeros(100, np.uint8)}, {}, "input down has 100 bytes, expected 17408 for 64 x 256"),
    ({"up": np.zeros(0, np.uint8)}, {}, "input up has 0 bytes"),
    ({"adapted": np.zeros(0, np.int64), "up": np.zeros(0, np.uint8)}, {}, "input up has 0 bytes"),
    ({}, {"rank": 32}, "input down has 17408 bytes, expected 8704"),
    ({}, {"rank": 48}, "rank is 48, expected a multiple of 32"),
    ({}, {"rank": -32}, "rank is -32"),
    ({}, {"rank": 1 << 40}, "rank is 1099511627776"),
    ({}, {"rank": 0}, "input adapted is there with an adapter of rank 0"),
    ({"adapted": None}, {}, "input adapted is absent with an adapter of rank 64"),
]


@pytest.mark.parametrize(("changed", "attributes", "says"), HOSTILE)
def test_hostile_adapters_end_in_an_error(
    dice: np.random.Generator, kind: str, changed: dict[str, Any], attributes: dict[str, Any], says: str
) -> None:
    feeds, _ = feeds_of(kind, dice)
    given = {name: value for name, value in (feeds | changed).items() if value is not None}
    with pytest.raises(Exception, match=says) as caught:
        run(kind, given, KINDS[kind][1] | {"rank": RANK} | attributes)
    assert type(caught.value).__module__.startswith("onnxruntime")
