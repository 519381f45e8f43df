"""Options as dataclass fields that declare their meaning, their range and where else they can be set.

Docstrings, checks and flags are made from these declarations; of generation options also the fields of HTTP requests,
OpenAPI and the table in the docs.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from inspect import getdoc
from textwrap import fill
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from spaceport.graphs.contract.faults import OptionFault

Options = TypeVar("Options")
_LARGEST = 2**64 - 1
_NUMBERS = {int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class OptionField:
    """An option; its type and its default are those of the dataclass field."""

    text: str  # one sentence
    least: float | None = None
    most: float | None = None  # of a text: characters
    unset: str = ""  # what happens if it is not set, for a default that does not say it
    flag: str | None = ""  # on the command line; None = it has none
    metavar: str | None = None
    request: str | None = ""  # field of HTTP requests; None = it has none
    request_default: Any = None  # where requests have another default
    name: str = ""
    kind: Any = None  # its type, without None
    default: Any = None
    optional: bool = False  # whether it may be None

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of an option that has a few only."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def values(self) -> str:
        """The range in words; empty: any value of its type."""
        if self.choices:
            return " or ".join(self.choices)
        if self.kind is str:
            return "" if self.most is None else f"at most {self.most} characters"
        if self.least is None:
            return ""
        if self.most is None:
            return f"at least {self.least}"
        return f"{self.least} to {'2**64 - 1' if self.most == _LARGEST else self.most}"

    @property
    def default_text(self) -> str:
        """The default in words; empty: nothing is set."""
        if self.unset or self.default in (None, "", (), {}):
            return self.unset
        return f"{self.default:g}" if self.kind is float else str(self.default)

    @property
    def described(self) -> str:
        """The sentence with range and default."""
        return self.with_facts(self.values, f"default: {self.default_text}" if self.default_text else "")

    def with_facts(self, *facts: str) -> str:
        """The sentence with facts in parentheses, apart from empty ones."""
        known = "; ".join(filter(None, facts))
        return f"{self.text.removesuffix('.')} ({known})." if known else self.text

    def check(self, value: object) -> None:
        """Raise for a value of another type or out of range."""
        if value is None and self.optional:
            return
        types = {float: (int, float)}.get(self.kind, self.kind)
        if self.kind in _NUMBERS:
            if not isinstance(value, types) or isinstance(value, bool) or not self._in_range(value):
                raise OptionFault(f"{self.name} is {value!r}: expected {_NUMBERS[self.kind]}{self._range()}")
        elif self.kind in (bool, str) and not isinstance(value, types):
            expected = "text" if self.kind is str else "True, False or None" if self.optional else "True or False"
            raise OptionFault(f"{self.name} is {value!r}: expected {expected}")
        elif self.kind is str and self.most is not None and len(str(value)) > self.most:
            raise OptionFault(f"{self.name} has {len(str(value))} characters: expected {self.values}")
        elif self.choices and value not in self.choices:
            raise OptionFault(f"{self.name} is {value!r}: expected {self.values}")

    def _in_range(self, value: Any) -> bool:
        """Whether a number, perhaps no number (NaN), is in the range."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def _range(self) -> str:
        return "" if not self.values else f" from {self.values}" if self.most is not None else f" of {self.values}"


def option(default: Any, text: str, least: float | None = None, most: float | None = None, **facts: Any) -> Any:
    """A dataclass field that is an option; a class or function as the default makes it for each object.

    `facts` are further fields of `OptionField`.
    """
    declared = {"option": OptionField(text, least, most, **facts)}
    if callable(default):
        return field(default_factory=default, metadata=declared, hash=default is not dict)
    return field(default=default, metadata=declared)


@cache
def option_fields(options: type) -> tuple[OptionField, ...]:
    """The generation options that a dataclass declares, in its order."""
    hints = get_type_hints(options)
    declared = []
    for entry in fields(options):
        if (found := entry.metadata.get("option")) is None:
            continue
        hint = hints[entry.name]
        members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kind = next(member for member in reversed(members) if member is not NoneType)
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        request_default = default if found.request_default is None else found.request_default
        flag = f"--{entry.name.replace('_', '-')}" if found.flag == "" else found.flag
        request = f"spaceport.{entry.name}" if found.request == "" else found.request
        named = {"name": entry.name, "flag": flag, "request": request, "request_default": request_default}
        declared.append(replace(found, **named, kind=kind, default=default, optional=NoneType in members))
    return tuple(declared)


def check_options(options: Any) -> None:
    """Raise for an option of another type or out of range."""
    for declared in option_fields(options.__class__):
        declared.check(getattr(options, declared.name))


def documented(options: type[Options]) -> type[Options]:
    """The dataclass with its options in its docstring."""
    kind: Any = options
    lines = [
        fill(f"- `{declared.name}`: {declared.described}", 116, subsequent_indent="  ", break_on_hyphens=False)
        for declared in option_fields(kind)
    ]
    options.__doc__ = "\n".join([f"{getdoc(options)}\n", *lines])
    return options
