"""The public API: what it exports, and what `help()` says about it."""

from __future__ import annotations

import inspect
import pydoc
import re
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

import spaceport.runtime
from spaceport.runtime import Decoding, Grammar, Runtime, SpaceportError


def entries(docstring: str | None) -> dict[str, str]:
    """The options or fields that a docstring lists, each with its description."""
    return dict(re.findall(r"^ *- `(\w+)`: (.+)$", docstring or "", re.MULTILINE))


def test_every_exported_name_exists_and_every_error_is_a_spaceport_error() -> None:
    assert sorted(set(spaceport.runtime.__all__)) == spaceport.runtime.__all__
    exported = [getattr(spaceport.runtime, name) for name in spaceport.runtime.__all__]
    errors = [value for value in exported if inspect.isclass(value) and issubclass(value, Exception)]
    assert len(errors) == 13
    assert [error for error in errors if not issubclass(error, SpaceportError)] == []


@pytest.mark.parametrize("name", spaceport.runtime.__all__)
def test_help_describes_every_class_with_its_methods_and_fields(name: str) -> None:
    value: Any = getattr(spaceport.runtime, name)
    if not inspect.isclass(value):
        return
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}(")  # the signature that dataclasses write where there is no docstring
    methods = [own for own in vars(value).values() if inspect.isfunction(own) and not own.__name__.startswith("_")]
    assert [own.__name__ for own in methods if not own.__doc__] == []
    documentation = inspect.getdoc(value) or ""
    if is_dataclass(value) and name != "Trace":
        assert set(entries(documentation)) == {field.name for field in fields(value) if field.init}
    if name in ("Decoding", "Sampling"):
        for described in re.split(r"^ *- ", documentation, flags=re.MULTILINE)[1:]:
            assert "default" in described


def test_help_describes_every_parameter_of_open() -> None:
    parameters = [name for name in inspect.signature(Runtime.open).parameters if name != "cls"]
    assert list(entries(inspect.getdoc(Runtime.open))) == parameters


def test_signatures_do_not_repeat_all_defaults_of_options() -> None:
    shown = pydoc.plain(pydoc.render_doc(Runtime))
    assert "decoding: 'Decoding | None' = None" in shown
    assert not re.search(r"= (Decoding|Limits|Sampling)\(", shown)


def test_options_are_named_and_unknown_ones_are_pythons_errors() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        Decoding(temperature=0.8)  # type: ignore[call-arg]
    for kind in (Decoding, Grammar):
        with pytest.raises(TypeError, match="positional argument"):
            kind(24)  # type: ignore[call-arg, misc]
