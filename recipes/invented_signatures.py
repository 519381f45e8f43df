"""Invented signatures: random combinations of real names, parameters and defaults, which a model cannot memorize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from recipes.parameter_answers import FEWEST_ITEMS, MOST_ITEMS
from recipes.signatures import Function, Parameter, ParameterKind

REAL_SHAPES = 0.5  # fraction with the parameter kinds of a real function
REAL_DEFAULTS = 0.6  # fraction of the defaults that stay with their parameter
JOINED_NAMES = 0.3  # fraction of the names that join parts of two names
RANDOM_NUMBERS = 0.1  # fraction of the defaults that are random numbers

_COLLECTORS: tuple[ParameterKind, ParameterKind] = ("values", "names")
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Pool:
    """Parts to sample from: no duplicates, in an order that depends only on the functions."""

    names: tuple[str, ...]  # of functions
    parameters: tuple[Parameter, ...]  # without * and ** parameters, by name and default
    collectors: tuple[Parameter, ...]
    defaults: tuple[str, ...]
    shapes: tuple[tuple[Parameter, ...], ...]  # parameters of real functions that are answered with a list


def pool_of(functions: Sequence[Function]) -> Pool:
    """Collect the parts of functions."""
    parameters = [parameter for function in functions for parameter in function.parameters]
    plain = dict.fromkeys(replace(one, kind="plain") for one in parameters if one.kind not in _COLLECTORS)
    return Pool(
        tuple(dict.fromkeys(function.name for function in functions)),
        tuple(plain),
        tuple(dict.fromkeys(one for one in parameters if one.kind in _COLLECTORS)),
        tuple(dict.fromkeys(one.default for one in plain if one.default is not None)),
        tuple(one.parameters for one in functions if FEWEST_ITEMS <= len(one.parameters) <= MOST_ITEMS),
    )


def invent(pool: Pool, rng: np.random.Generator) -> Function:
    """A random function with 3 to 8 parameters, all names different."""
    real = rng.random() < REAL_SHAPES
    shape = [(one.kind, one.required) for one in _pick(pool.shapes, rng)] if real else _shape(rng)
    parameters = [_parameter(pool, kind, required, rng) for kind, required in shape]
    while len({one.name for one in parameters}) < len(parameters):
        parameters = [_parameter(pool, kind, required, rng) for kind, required in shape]
    return Function(_pick(pool.names, rng), tuple(parameters))


def _shape(rng: np.random.Generator) -> list[tuple[ParameterKind, bool]]:
    """Random parameter kinds in valid Python order, each with whether it is required."""
    count = int(rng.integers(FEWEST_ITEMS, MOST_ITEMS + 1))
    values, names = rng.random(2) < 0.15
    own = count - int(values) - int(names)
    named = int(rng.integers(1, own + 1)) if rng.random() < (0.5 if values else 0.15) else 0
    positional = own - named
    before = int(rng.integers(1, positional + 1)) if positional and rng.random() < 0.06 else 0
    required = int(rng.integers(positional + 1))
    shape: list[tuple[ParameterKind, bool]] = [
        ("before" if index < before else "plain", index < required) for index in range(positional)
    ]
    shape += [("values", False)] * int(values)
    shape += [("named", bool(rng.random() < 0.2)) for _ in range(named)]
    return shape + [("names", False)] * int(names)


def _parameter(pool: Pool, kind: ParameterKind, required: bool, rng: np.random.Generator) -> Parameter:
    if kind in _COLLECTORS:
        return replace(_pick([one for one in pool.collectors if one.kind == kind], rng), kind=kind)
    real = _pick(pool.parameters, rng)
    name, default = real.name, real.default
    if rng.random() < JOINED_NAMES:
        parts = [part for part in _pick(pool.parameters, rng).name.split("_") if part]
        name = f"{name.strip('_').split('_')[0]}_{parts[-1]}" if parts else name
    if required:
        return Parameter(name, kind)
    if rng.random() < RANDOM_NUMBERS:
        return Parameter(name, kind, str(rng.integers(10 ** int(rng.integers(1, 4)))))
    if default is None or rng.random() >= REAL_DEFAULTS:
        default = _pick(pool.defaults, rng)
    return Parameter(name, kind, default)


def _pick(items: Sequence[_Item], rng: np.random.Generator) -> _Item:
    return items[int(rng.integers(len(items)))]
