"""JSON lines: the numbered lines of a data file, and the JSON object on a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spaceport.graphs.contract.faults import InputFault

LONGEST_LINE = 64 * 2**20  # bytes; limits memory on files without newlines


def read_lines(path: Path, expected: str, each: str) -> Iterator[tuple[int, bytes]]:
    """Non-blank lines with their numbers; errors name the `expected` kind of file and what `each` line has."""
    if path.is_dir():
        raise InputFault(f"{path}: is a folder: expected {expected}")
    try:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(text) > LONGEST_LINE:
                    raise InputFault(
                        f"{path} line {number}: longer than {LONGEST_LINE:,} bytes: expected one {each} per line"
                    )
                text = text.removeprefix(b"\xef\xbb\xbf")  # byte order mark; concatenated files have several
                if text.strip():
                    yield number, text
    except FileNotFoundError as error:
        raise InputFault(f"{path}: no such file: expected {expected}") from error
    except OSError as error:
        raise InputFault(f"{path}: cannot be read: {error.strerror or error}") from error


def text_of(line: bytes) -> str:
    """A line as text."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputFault(f"not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from error


def object_of(line: bytes, hint: str) -> dict[str, Any]:
    """The JSON object on a line; `hint` says how a line that is no JSON can be given."""
    try:
        data = json.loads(text_of(line))
    except InputFault:
        raise
    except RecursionError as error:
        raise InputFault("JSON that is nested too deeply: expected a flat object") from error
    except ValueError as error:
        found = (
            f"{error.msg.removesuffix(' at')} at column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        raise InputFault(f"not JSON ({found}): expected one object on each line; {hint}") from error
    if not isinstance(data, dict):
        raise InputFault(f"holds {kind_of(data)}: expected an object on each line")
    return data


def flag_of(data: dict[str, Any], name: str) -> bool:
    """An optional true or false of a line; true if it is absent."""
    given = data.get(name, True)
    if not isinstance(given, bool):
        raise InputFault(f'"{name}" is {kind_of(given)}: expected true or false')
    return given


def content_of(value: Any, what: str) -> str:
    """A text of a line, which may not be blank; `what` names it in errors."""
    if not isinstance(value, str):
        raise InputFault(f"{what} is {kind_of(value)}: expected a string")
    if not value.strip():
        raise InputFault(f"{what} is empty: expected text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputFault(f"{what} holds half of a character ({value[error.start]!r}): expected whole ones") from error
    return value


def kind_of(value: Any) -> str:
    """The kind of a JSON value, as an error names it."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
