"""Prompts: what a file asks, one prompt on each line, and the tokens that a model makes of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.chat import Message

_FORMS = ("messages", "prompt", "text")
_EXPECTED = 'expected one of "messages", "prompt" and "text"'


@dataclass(frozen=True)
class AuditPrompt:
    """One prompt of a file; lines count from 1."""

    line: int
    prompt: str | tuple[Message, ...]
    bare: str | None = None  # what is asked of a model that has no chat template


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt in a model's tokens."""

    line: int  # of the file
    tokens: tuple[int, ...]


def read_prompts(path: Path) -> list[AuditPrompt]:
    """The prompts of a file: JSON objects if its first line begins with a brace, plain text otherwise."""
    if path.is_dir():
        raise InputFault(f"{path}: is a folder: expected a file of prompts, one on each line")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputFault(f"{path} line {line}: not UTF-8 text ({error.reason}): save it as UTF-8") from error
    except OSError as error:
        raise InputFault(f"{path}: {error.strerror}: expected a file of prompts, one on each line") from error
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InputFault(f"{path}: holds no prompt: expected at least one line of text or JSON")
    if not lines[0][1].lstrip().startswith("{"):
        return [AuditPrompt(number, line) for number, line in lines]
    return [_asked(path, number, line) for number, line in lines]


def questions(runtime: Runtime, asked: list[AuditPrompt], max_tokens: int, path: Path) -> list[TokenizedPrompt]:
    """The prompts in a model's tokens; raises for the first that does not fit together with its text.

    None is left out: where masks and positions go wrong, long texts show it first.
    """
    return [_question(runtime, one, max_tokens, path) for one in asked]


def _question(runtime: Runtime, asked: AuditPrompt, max_tokens: int, path: Path) -> TokenizedPrompt:
    templated = TEMPLATE_FILE in runtime.bundle.manifest.files
    try:
        tokens = runtime.tokens_of(asked.prompt if asked.bare is None or templated else asked.bare)
    except OptionFault as error:
        raise InputFault(f"{path} line {asked.line}: {error}") from error
    if len(tokens) + max_tokens > runtime.max_seq_len:
        raise InputFault(
            f"{path} line {asked.line}: {len(tokens)} prompt tokens and --max-tokens {max_tokens} make "
            f"{len(tokens) + max_tokens}, --max-seq-len is {runtime.max_seq_len}: shorten the prompt, lower --max-tokens, or "
            f"raise --max-seq-len (the model goes up to {runtime.bundle.manifest.max_positions})"
        )
    return TokenizedPrompt(asked.line, tuple(tokens))


def _asked(path: Path, number: int, line: str) -> AuditPrompt:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputFault(
            f"{path} line {number}: not JSON ({error}): expected an object on each line, as on the first; plain text goes in as "
            '{"text": "..."}'
        ) from error
    forms = [form for form in _FORMS if form in data] if isinstance(data, dict) else []
    if len(forms) != 1:
        found = " and ".join(f'"{form}"' for form in forms) or "none of them"
        raise InputFault(f"{path} line {number}: holds {found}: {_EXPECTED}")
    given = data[forms[0]]
    if forms[0] == "messages":
        return AuditPrompt(number, _question_of(path, number, given))
    if not isinstance(given, str) or not given.strip():
        raise InputFault(f'{path} line {number}: "{forms[0]}" is {_shown(given)}: expected text')
    return (
        AuditPrompt(number, given)
        if forms[0] == "text"
        else AuditPrompt(number, ({"role": "user", "content": given},), given)
    )


def _question_of(path: Path, number: int, messages: Any) -> tuple[Message, ...]:
    """What stands before the last answer, or all of it if there is none."""
    turns = messages if isinstance(messages, list) else []
    if not turns or not all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns):
        raise InputFault(
            f'{path} line {number}: "messages" is {_shown(messages)}: expected a list of turns, each with "role" and "content"'
        )
    answers = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    asked = tuple(turns[: answers[-1]] if answers else turns)
    if not asked:
        raise InputFault(f"{path} line {number}: its first turn is of the assistant: expected a turn before it")
    return asked


def _shown(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 40 else f"{text[:39]}…"
