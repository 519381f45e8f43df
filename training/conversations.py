"""Conversations: reads JSONL training data, one conversation per line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from spaceport.graphs.contract.faults import InputFault

Parsed = TypeVar("Parsed")
LONGEST_LINE = 64 * 2**20  # bytes; limits memory on files without newlines


def read_each(path: Path, expected: str, each: str, parse: Callable[[int, bytes], Parsed]) -> list[Parsed]:
    """What the non-blank lines of a file hold, by their numbers; errors name the `expected` kind of file, and the line.

    `each` is what a line has, such as "prompt".
    """
    if path.is_dir():
        raise InputFault(f"{path}: is a folder: expected {expected}")
    found, number = [], 0
    try:
        with path.open("rb") as file:
            while text := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(text) > LONGEST_LINE:
                    raise InputFault(f"longer than {LONGEST_LINE:,} bytes: expected one {each} per line")
                text = text.removeprefix(b"\xef\xbb\xbf")  # byte order mark; concatenated files have several
                if text.strip():
                    found.append(parse(number, text))
    except InputFault as error:
        raise InputFault(f"{path} line {number}: {error}") from error
    except FileNotFoundError as error:
        raise InputFault(f"{path}: no such file: expected {expected}") from error
    except OSError as error:
        raise InputFault(f"{path}: cannot be read: {error.strerror or error}") from error
    if not found:
        raise InputFault(f"{path}: has no {each}: expected at least one line")
    return found


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


ROLES = ("system", "user", "assistant", "tool")
TEXT = "text"  # role of a plain text's only turn

_FORMATS = (("messages",), ("prompt", "response"), ("text",))
_EXPECTED = 'expected one of "messages", "prompt" with "response", and "text"'


@dataclass(frozen=True)
class Turn:
    """One message: its role (or `text` for a plain text) and content."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """The turns on one line of a file."""

    line: int  # from 1
    turns: tuple[Turn, ...]
    fork: bool = True  # False: train the answer without forks even if it has a paragraph tree
    ends: bool = True  # False: the text or the last answer is unfinished, so no end-of-text token follows


def read_conversations(path: Path) -> list[Conversation]:
    """All conversations of a JSONL file, in file order."""
    return read_each(path, "a JSONL file of conversations", "conversation", _conversation)


def _conversation(line: int, text: bytes) -> Conversation:
    data = object_of(text, 'plain text goes in as {"text": "..."}')
    return Conversation(line, _turns(data), flag_of(data, "fork"), flag_of(data, "ends"))


def turns_of(messages: Any) -> tuple[Turn, ...]:
    """The turns of the value of "messages", with roles in a possible order."""
    if not isinstance(messages, list) or not messages:
        found = "is an empty list" if messages == [] else f"is {kind_of(messages)}"
        raise InputFault(f'"messages" {found}: expected a list of turns, each with "role" and "content"')
    turns: list[Turn] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise InputFault(f'turn {number} is {kind_of(message)}: expected an object with "role" and "content"')
        role = message.get("role")
        if role not in ROLES:
            raise InputFault(f"turn {number} has role {_shown(role)}: expected one of {', '.join(ROLES)}")
        _in_order(number, role, turns)
        turns.append(Turn(role, content_of(message.get("content"), f"the content of turn {number} ({role})")))
    return tuple(turns)


def _turns(data: dict[str, Any]) -> tuple[Turn, ...]:
    """The turns of a line, whichever of the three forms it has."""
    forms = [form for form in _FORMATS if all(name in data for name in form)]
    if len(forms) > 1:
        names = " and ".join(f'"{form[0]}"' for form in forms)
        raise InputFault(f"holds {names}: {_EXPECTED}, not several")
    if not forms:
        half = next((name for name in ("prompt", "response") if name in data), None)
        found = f'"{half}" alone' if half else ", ".join(f'"{name[:40]}"' for name in list(data)[:5]) or "nothing"
        raise InputFault(f"holds {found}: {_EXPECTED}")
    if forms[0] == ("messages",):
        turns = turns_of(data["messages"])
        if all(turn.role != "assistant" for turn in turns):
            raise InputFault(
                "no assistant turn in messages: expected at least one, it is what is learned; `spaceport distill` generates "
                "answers to prompts"
            )
        return turns
    if forms[0] == ("text",):
        return (Turn(TEXT, content_of(data["text"], '"text"')),)
    return (
        Turn("user", content_of(data["prompt"], '"prompt"')),
        Turn("assistant", content_of(data["response"], '"response"')),
    )


def _in_order(number: int, role: str, before: list[Turn]) -> None:
    """Refuse a turn whose role is not allowed at this point."""
    last = before[-1].role if before else None
    if role == "system" and before:
        raise InputFault(f"turn {number} is of the system: expected it first, or not at all")
    if role == "assistant" and last is None:
        raise InputFault(f"turn {number} is of the assistant: expected a turn before it that it answers")
    if role == "assistant" and last == "assistant":
        raise InputFault(f"turns {number - 1} and {number} are both of the assistant: join them into one")
    if role == "tool" and all(turn.role != "assistant" for turn in before):
        raise InputFault(f"turn {number} is of a tool: expected a turn of the assistant before it, which called it")


def _shown(value: Any) -> str:
    return repr(value[:40]) if isinstance(value, str) else kind_of(value)
