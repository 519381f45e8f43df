"""The public API: what it exports, and what `help()` says about it."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

import spaceport.runtime
from spaceport.runtime import Decoding, Grammar, Limits, OptionFault, Runtime, Sampling, SpaceportError


def entries(docstring: str | None) -> dict[str, str]:
    """The options or fields that a docstring lists, each with its description."""
    return dict(re.findall(r"^ *- `(\w+)`: (.+)$", docstring or "", re.MULTILINE))


def test_every_exported_name_exists_and_every_error_is_a_spaceport_error() -> None:
    assert sorted(set(spaceport.runtime.__all__)) == spaceport.runtime.__all__
    exported = [getattr(spaceport.runtime, name) for name in spaceport.runtime.__all__]
    errors = [value for value in exported if inspect.isclass(value) and issubclass(value, Exception)]
    assert len(errors) == 14
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


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (
            Decoding,
            {"max_tokens": 8, "temperature": 0.8, "top_p": 0.9},
            "Decoding has no option temperature (got 0.8): expected sampling=Sampling(temperature=0.8, top_p=0.9)",
        ),
        (
            Runtime.generate,
            {"self": None, "prompt": "", "seed": 3, "max_tokens": 8},
            "Runtime.generate has no option seed (got 3): expected decoding=Decoding(max_tokens=8, sampling=Sampling(seed=3))",
        ),
        (
            Runtime.stream,
            {"self": None, "prompt": "", "max_tokens": 3},
            "option max_tokens (got 3): expected decoding=Decoding(max_tokens=3)",
        ),
        (Decoding, {"regex": "[a-z]+"}, "expected grammar=Grammar(regex='[a-z]+')"),
        (Decoding, {"max_new_tokens": 8}, "Decoding has no option max_new_tokens (got 8): expected max_tokens=8"),
        (Sampling, {"temprature": 1}, "Sampling has no option temprature (got 1): expected temperature=1"),
        (Sampling, {"n": 2}, "Sampling has no option n (got 2): expected one of temperature, top_k, top_p, "),
        (Grammar, {"json": "{}"}, "Grammar has no option json (got '{}'): expected "),
        (Limits, {"threds": 3}, "Limits has no option threds (got 3): expected threads=3"),
        (
            Runtime.open,
            {"bundle": "x", "prompt_chars": 3},
            "option prompt_chars (got 3): expected limits=Limits(prompt_chars=3)",
        ),
    ],
)
def test_an_unknown_option_is_an_error_that_says_what_to_write(
    call: Callable[..., object], options: dict[str, object], message: str
) -> None:
    with pytest.raises(OptionFault, match=re.escape(message)):
        call(**options)


def test_a_missing_argument_is_pythons_error() -> None:
    with pytest.raises(TypeError, match="required positional argument"):
        Runtime.score()  # type: ignore[call-arg]


def test_options_are_named() -> None:
    message = r"Grammar got 'json_schema' without a name: expected Grammar\(NAME=…\) with one of regex, json_schema, "
    with pytest.raises(OptionFault, match=message):
        Grammar("json_schema", "{}")  # type: ignore[call-arg, misc]
    with pytest.raises(
        OptionFault, match=r"Decoding got 24 without a name: expected Decoding\(NAME=…\) with one of .*max_tokens"
    ):
        Decoding(24)  # type: ignore[misc]
