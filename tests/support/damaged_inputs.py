"""Runs native operators on inputs with one damage each: bytes, shapes, attributes, ids, slots, masks.

    PYTHONPATH=tests python -m support.damaged_inputs FIRST COUNT

Prints the number of each case before it runs, so that the last one has ended a process that crashed.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spaceport.kernels.packing import WEIGHT_FORMATS, pack
from support.native_operators import Operator, available_sets, normal, random_weights
from support.operator_reference import CASES

Feeds = dict[str, NDArray[Any]]

_ROWS, _WIDTH, _RANK = 5, 256, 64
_DAMAGES = 8  # of each node
NUMBERS = (-1, 0, 1, 3, 5, 63, 64, 100, 127, 2**31 - 1, 2**31, 2**40, 2**63 - 1, -(2**31), -(2**63))
FLOATS = (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, 0.0, -0.0)
TEXTS = ("", "int4", "int4_pair", "int5", "int8", "int8_k16", "none", "layer", "rms", "silu", ",", "int8," * 99, "%s%n")


class Node(NamedTuple):
    """A node that native operators compute, unless it is damaged."""

    kind: str
    feeds: Feeds
    attributes: dict[str, Any]


def valid_node(dice: np.random.Generator) -> Node:
    """One operator with random inputs."""
    format_name = str(dice.choice(list(WEIGHT_FORMATS)))

    def weights(outputs: int) -> NDArray[np.uint8]:
        return pack(random_weights(dice, format_name, outputs, _WIDTH))

    def with_adapter(kind: str, feeds: Feeds, attributes: dict[str, Any], outputs: int) -> Node:
        if dice.random() < 0.5:
            return Node(kind, feeds, attributes)
        adapter = {
            "adapted": np.array([[4, 1]]),
            "down": pack(random_weights(dice, "int8", _RANK, _WIDTH)),
            "up": pack(random_weights(dice, "int8", outputs, _RANK)),
        }
        return Node(kind, feeds | adapter, attributes | {"rank": _RANK})

    x, gain = normal(dice, _ROWS, _WIDTH), normal(dice, _WIDTH)
    norm = {"norm": str(dice.choice(["rms", "layer", "none"])), "epsilon": 1e-5}
    formats = {"format": format_name}
    kind = str(dice.choice(["AddProduct", "NormProduct", "GateProduct", "Embed", "Head", "Attend"]))
    if kind == "AddProduct":
        feeds = {"x": x, "residual": normal(dice, _ROWS, 75), "weights": weights(75), "bias": normal(dice, 75)}
        return with_adapter(kind, feeds, formats | {"width": 75}, 75)
    if kind == "NormProduct":
        feeds = {"x": x, "gain": gain, "weights": weights(64), "weights2": weights(40), "bias2": normal(dice, 40)}
        attributes = {"widths": [64, 40], "formats": f"{format_name},{format_name}", "activation": "gelu"}
        return with_adapter(kind, feeds, norm | attributes, 104)
    if kind == "GateProduct":
        feeds = {"x": x, "gain": gain, "weights": weights(96), "bias": normal(dice, 96)}
        return with_adapter(kind, feeds, norm | formats | {"width": 48, "activation": "silu"}, 96)
    if kind == "Embed":
        attributes = formats | {"vocabulary": 100, "width": _WIDTH, "scale": 2.0}
        return Node(kind, {"ids": dice.integers(0, 100, (1, _ROWS)), "weights": weights(100)}, attributes)
    if kind == "Head":
        feeds = {"x": x, "rows": np.array([[4, 0]]), "weights": weights(100), "gain": gain}
        return Node(kind, feeds, norm | formats | {"vocabulary": 100, "cap": 5.0})
    case = CASES[str(dice.choice([name for name in CASES if name != "many slots"]))]
    return Node(kind, case.feeds(dice), case.attributes)


def damage_values(dice: np.random.Generator, node: Node) -> str:
    """Change some values of an input, such as a scale to NaN or a slot to one that another row has."""
    name = str(dice.choice(list(node.feeds)))
    array = node.feeds[name] = node.feeds[name].copy()
    if array.dtype == np.bool_:
        array[..., dice.integers(array.shape[-2]), :] = bool(dice.integers(2))
    elif array.dtype == np.int64:
        array.flat[dice.integers(array.size)] = dice.choice([*NUMBERS, int(array.flat[0])])
    elif array.dtype == np.float32 and dice.random() < 0.5:
        array.flat[dice.integers(0, array.size, 1 + dice.integers(8))] = dice.choice(FLOATS)
    else:
        raw = array.reshape(-1).view(np.uint8)
        raw[dice.integers(0, raw.size, 1 + dice.integers(64))] = dice.integers(0, 256, dtype=np.uint8)
        if dice.random() < 0.3:
            start = dice.integers(raw.size)
            raw[start : start + 64] = 255  # scales of NaN
    return f"values of {name}"


def damage_shape(dice: np.random.Generator, node: Node) -> str:
    """Cut, repeat, empty or rearrange an input, or leave it out."""
    name = str(dice.choice(list(node.feeds)))
    array = node.feeds[name]
    axis = int(dice.integers(array.ndim))
    size = array.shape[axis]
    changes = [
        lambda: np.take(array, np.arange(size - 1), axis),
        lambda: np.take(array, np.arange(size + 1) % size, axis),
        lambda: np.take(array, np.arange(2 * size) % size, axis),
        lambda: np.take(array, np.arange(int(dice.integers(size))), axis),
        lambda: np.take(array, np.arange(0), axis),
        lambda: array.reshape(-1),
        lambda: array[None],
        lambda: array.reshape(array.shape[::-1]),
        lambda: array.T,
        lambda: array.reshape(-1)[0].reshape(()),
    ]
    number = int(dice.integers(len(changes) + 1))
    if number == len(changes):
        del node.feeds[name]
    else:
        node.feeds[name] = np.copy(changes[number](), order="C")
    return f"shape {number} of {name}"


def damage_attribute(dice: np.random.Generator, node: Node) -> str:
    """Give an attribute another value, or leave it out."""
    name = str(dice.choice(list(node.attributes)))
    value = node.attributes[name]
    if dice.random() < 0.1:
        del node.attributes[name]
    elif isinstance(value, str):
        node.attributes[name] = str(dice.choice(TEXTS))
    elif isinstance(value, float):
        node.attributes[name] = float(dice.choice(FLOATS))
    elif isinstance(value, int):
        node.attributes[name] = int(dice.choice([*NUMBERS, value + 1, value - 1, 2 * value]))
    else:
        changed = [*value, 16] if dice.random() < 0.3 else list(value)
        changed[dice.integers(len(changed))] = int(dice.choice(NUMBERS))
        node.attributes[name] = changed
    return f"attribute {name}"


@lru_cache(maxsize=1)
def _valid_case(number: int) -> tuple[Node, dict[str, Any], Operator, list[tuple[tuple[int, ...], np.dtype[Any]]]]:
    """A node, how it is run, its session, and the shapes and types of its outputs."""
    dice = np.random.default_rng(number)
    node = valid_node(dice)
    constants = tuple(name for name in node.feeds if name in ("weights", "weights2", "down", "up"))
    how: dict[str, Any] = {
        "set_name": str(dice.choice(available_sets())),
        "threads": int(dice.integers(1, 3)),
        "constants": constants if dice.random() < 0.5 else (),
    }
    operator = Operator(*node, **how)
    return node, how, operator, [(output.shape, output.dtype) for output in operator(node.feeds)]


def run_case(number: int) -> str:
    """Run the damaged node of a number: what became of it. Raises if outputs have another shape or type."""
    (kind, feeds, attributes), how, operator, expected = _valid_case(number // _DAMAGES)
    node = Node(kind, dict(feeds), dict(attributes))
    dice = np.random.default_rng([number])
    damage = [damage_values, damage_shape, damage_attribute][dice.integers(3)]
    what = damage(dice, node)
    constants = tuple(name for name in how["constants"] if name in node.feeds)
    print(number, kind, how["set_name"], what, flush=True)
    is_fed = damage is damage_values and all(node.feeds[name] is feeds[name] for name in constants)
    try:
        outputs = (operator if is_fed else Operator(*node, **how | {"constants": constants}))(node.feeds)
    except Exception as error:
        if type(error).__module__.startswith("onnxruntime"):
            return "errors"
        raise
    found = [(output.shape, output.dtype) for output in outputs]
    if damage is damage_values and found != expected:
        raise AssertionError(f"case {number}: {found}, expected {expected}")
    return "outputs"


def main(first: int, count: int) -> None:
    print(dict(Counter(run_case(number) for number in range(first, first + count))))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
