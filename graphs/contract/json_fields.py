"""JSON fields: parsed JSON read as the types of dataclasses say, with errors that name the path of the wrong value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

from spaceport.graphs.contract.faults import InputFault

T = TypeVar("T")

_MAX_LENGTH = 60  # characters of a value in an error message


@dataclass(frozen=True)
class Rules:
    """How values of one kind of file are checked and reported."""

    fault: type[InputFault]  # raised for a wrong value
    advice: str = ""  # end of each error message: what to do


@dataclass(frozen=True)
class JsonField:
    """A value of parsed JSON, its path, and the rules of its file."""

    value: object
    path: str
    rules: Rules
    prefix: str | None = None  # path prefix of its entries; None: its own path and a dot

    def refuse(self, expected: str) -> NoReturn:
        """Raise an error that shows the value and what was expected."""
        self.fail(f"is {short(self.value)}: expected {expected}")

    def fail(self, problem: str) -> NoReturn:
        """Raise an error with the value's path and this problem."""
        raise self.rules.fault(f"{self.path} {problem}{self.rules.advice}")

    def or_none(self, read: Callable[[JsonField], T]) -> T | None:
        return None if self.value is None else read(self)

    def object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            self.fail(f"is {type(self.value).__name__}: expected an object")
        return cast(dict[str, Any], self.value)

    def entry(self, name: str) -> JsonField:
        """A required entry of an object."""
        if not isinstance(self.value, dict) or name not in self.value:
            self.refuse(f"an object with the entry {name!r}")
        return self.entry_or_null(name)

    def entry_or_null(self, name: str) -> JsonField:
        """An optional entry of an object; null if it is missing."""
        prefix = f"{self.path}." if self.prefix is None else self.prefix
        return JsonField(self.object().get(name), f"{prefix}{name}", self.rules)

    def entries(self, kind: type) -> dict[str, JsonField]:
        """The entries of an object that must have exactly the fields of a dataclass."""
        return self.exactly(*(part.name for part in fields(kind)))

    def exactly(self, *names: str) -> dict[str, JsonField]:
        """The entries of an object that must have exactly these names."""
        present, expected = set(self.object()), set(names)
        for problem, wrong in (("lacks", expected - present), ("has the unknown", present - expected)):
            if wrong:
                self.fail(f"{problem} {', '.join(map(ascii, sorted(wrong)))}: expected {', '.join(sorted(expected))}")
        return {name: self.entry(name) for name in names}

    def members(self) -> dict[str, JsonField]:
        """The entries of an object with arbitrary names, such as file names."""
        return {name: JsonField(value, f"{self.path}[{name!r}]", self.rules) for name, value in self.object().items()}

    def items(self, of: str = "") -> list[JsonField]:
        """The items of a list; `of` names them in the error message."""
        if not isinstance(self.value, list):
            self.refuse(f"a list of {of}" if of else "a list")
        return [JsonField(item, f"{self.path}[{index}]", self.rules) for index, item in enumerate(self.value)]

    def each(self, read: Callable[[JsonField], T]) -> tuple[T, ...]:
        return tuple(read(item) for item in self.items())

    def whole(self, least: int = 0, most: int | None = None) -> int:
        if not is_whole(self.value, least):
            self.refuse(f"a whole number of at least {least}")
        if most is not None and cast(int, self.value) > most:
            self.refuse(f"at most {most}")
        return cast(int, self.value)

    def wholes(self) -> tuple[int, ...]:
        return self.each(JsonField.whole)

    def number(self) -> float:
        if not isinstance(self.value, (int, float)) or isinstance(self.value, bool):
            self.refuse("a number")
        try:
            return float(self.value)
        except OverflowError:
            self.refuse("a number that a float can hold")

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            self.refuse("true or false")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str):
            self.refuse("text")
        return self.value

    def one_of(self, names: tuple[T, ...]) -> T:
        if self.value not in names:
            self.refuse(" or ".join(map(str, names)))
        return names[names.index(self.value)]


def between(least: int, most: int) -> Callable[[JsonField], int]:
    """The reader of whole numbers in this range: `Annotated[int, between(0, 9)]`."""
    return lambda entry: entry.whole(least, most)


def read(entry: JsonField, kind: Any) -> Any:
    """A value of a type: a dataclass with its fields, a Literal, tuple, dict, T | None, int, float, bool or str.

    `Annotated[T, reader]` is read by its reader. A ValueError of a dataclass begins with the name of its wrong field.
    """
    options = get_args(kind)
    if is_dataclass(kind):
        types, entries = get_type_hints(kind, include_extras=True), entry.entries(cast(type, kind))
        values = {name: read(field, types[name]) for name, field in entries.items()}
        try:
            return cast(type, kind)(**values)
        except ValueError as error:
            raise entry.rules.fault(f"{entry.path}.{error}{entry.rules.advice}") from error
    if get_origin(kind) is Annotated:
        return options[1](entry)
    if get_origin(kind) is Literal:
        return entry.one_of(options)
    if get_origin(kind) is dict:
        return {name: read(member, options[1]) for name, member in entry.members().items()}
    if get_origin(kind) is tuple and options[-1] is ...:
        return entry.each(lambda item: read(item, options[0]))
    if get_origin(kind) is tuple:
        items = entry.items()
        if len(items) != len(options):
            entry.refuse(f"{len(options)} values")
        return tuple(map(read, items, options))
    if NoneType in options:
        return entry.or_none(lambda value: read(value, options[0]))
    return entry.value if kind is Any else _READERS[kind](entry)


_READERS: dict[type, Callable[[JsonField], Any]] = {
    int: JsonField.whole,
    float: JsonField.number,
    bool: JsonField.boolean,
    str: JsonField.text,
}


def is_whole(value: object, least: int) -> bool:
    """Whether a value of parsed JSON is an integer of at least `least`; booleans do not count."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def short(value: object) -> str:
    """A value as error messages show it, shortened to 60 characters."""
    text = repr(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."
