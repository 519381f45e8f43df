"""Invented signatures: real names, parameters and defaults put together anew, so that a model has to read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from spaceport.tools.demo_recipe.parameter_answers import FEWEST_ITEMS, MOST_ITEMS
from spaceport.tools.demo_recipe.signatures import Function, Parameter, ParameterKind

REAL_SHAPES = 0.5  # share that has the kinds of parameters of a real function
REAL_DEFAULTS = 0.6  # share of the defaults that stand at their parameter
JOINED_NAMES = 0.3  # share of the names that are made of the parts of two
DRAWN_NUMBERS = 0.1  # share of the defaults that are any number

_COLLECTORS: tuple[ParameterKind, ParameterKind] = ("values", "names")
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Pool:
    """What is drawn from: each thing once, in an order that only the functions decide."""

    names: tuple[str, ...]  # of functions
    parameters: tuple[Parameter, ...]  # that collect nothing, by name and default
    collectors: tuple[Parameter, ...]
    defaults: tuple[str, ...]
    shapes: tuple[tuple[Parameter, ...], ...]  # of real functions, as many parameters as a list has


def pool_of(functions: Sequence[Function]) -> Pool:
    """The parts of functions."""
    parameters = [parameter for function in functions for parameter in function.parameters]
    plain = dict.fromkeys(replace(one, kind="plain") for one in parameters if one.kind not in _COLLECTORS)
    return Pool(
        tuple(dict.fromkeys(function.name for function in functions)),
        tuple(plain),
        tuple(dict.fromkeys(one for one in parameters if one.kind in _COLLECTORS)),
        tuple(dict.fromkeys(one.default for one in plain if one.default is not None)),
        tuple(one.parameters for one in functions if FEWEST_ITEMS <= len(one.parameters) <= MOST_ITEMS),
    )


def invent(pool: Pool, dice: np.random.Generator) -> Function:
    """A function with as many parameters as a list has, no two of one name."""
    real = dice.random() < REAL_SHAPES
    shape = [(one.kind, one.required) for one in _pick(pool.shapes, dice)] if real else _shape(dice)
    drawn = [_parameter(pool, kind, required, dice) for kind, required in shape]
    while len({one.name for one in drawn}) < len(drawn):
        drawn = [_parameter(pool, kind, required, dice) for kind, required in shape]
    return Function(_pick(pool.names, dice), tuple(drawn))


def _shape(dice: np.random.Generator) -> list[tuple[ParameterKind, bool]]:
    """Kinds in the order that Python asks for, each with whether it is required."""
    count = int(dice.integers(FEWEST_ITEMS, MOST_ITEMS + 1))
    values, names = dice.random(2) < 0.15
    own = count - int(values) - int(names)
    named = int(dice.integers(1, own + 1)) if dice.random() < (0.5 if values else 0.15) else 0
    places = own - named
    before = int(dice.integers(1, places + 1)) if places and dice.random() < 0.06 else 0
    required = int(dice.integers(places + 1))
    shape: list[tuple[ParameterKind, bool]] = [
        ("before" if place < before else "plain", place < required) for place in range(places)
    ]
    shape += [("values", False)] * int(values)
    shape += [("named", bool(dice.random() < 0.2)) for _ in range(named)]
    return shape + [("names", False)] * int(names)


def _parameter(pool: Pool, kind: ParameterKind, required: bool, dice: np.random.Generator) -> Parameter:
    if kind in _COLLECTORS:
        return replace(_pick([one for one in pool.collectors if one.kind == kind], dice), kind=kind)
    real = _pick(pool.parameters, dice)
    name, default = real.name, real.default
    if dice.random() < JOINED_NAMES:
        parts = [part for part in _pick(pool.parameters, dice).name.split("_") if part]
        name = f"{name.strip('_').split('_')[0]}_{parts[-1]}" if parts else name
    if required:
        return Parameter(name, kind)
    if dice.random() < DRAWN_NUMBERS:
        return Parameter(name, kind, str(dice.integers(10 ** int(dice.integers(1, 4)))))
    if default is None or dice.random() >= REAL_DEFAULTS:
        default = _pick(pool.defaults, dice)
    return Parameter(name, kind, default)


def _pick(items: Sequence[_Item], dice: np.random.Generator) -> _Item:
    return items[int(dice.integers(len(items)))]
