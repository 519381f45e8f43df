"""Prompt file: reads the prompts that a model answers, JSONL or plain text, one per line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.tune.conversations import Turn, turns_of
from spaceport.tools.tune.json_lines import content_of, flag_of, object_of, read_lines, text_of
from spaceport.tools.tune.own_answers import AnswerPrompt

TEXT_SUFFIX = ".txt"

_EXPECTED = 'expected "messages" or "prompt"'
_REPLACED = ("messages", "prompt", "response", "ends")  # keys that the output sets or leaves out


@dataclass(frozen=True)
class FilePrompt:
    """The prompt on one line of a file."""

    prompt: AnswerPrompt
    others: dict[str, Any]  # keys of the line that the output repeats, such as an id

    @property
    def line(self) -> int:
        return self.prompt.line


def read_prompts(path: Path) -> list[FilePrompt]:
    """All prompts of a file in file order: plain text if its name ends with .txt, JSON objects otherwise."""
    plain = path.suffix.lower() == TEXT_SUFFIX
    prompts = []
    for line, content in read_lines(path, "a prompt file with one prompt per line", "prompt"):
        try:
            prompts.append(_plain(line, content) if plain else _parsed(line, content))
        except InputFault as error:
            raise InputFault(f"{path} line {line}: {error}") from error
    if not prompts:
        raise InputFault(f"{path}: has no prompt: expected at least one line")
    return prompts


def parts_of(turns: Sequence[Turn]) -> tuple[tuple[Turn, ...], ...]:
    """The turns in parts that each end where an answer is missing; an answer at the end is left out."""
    given = turns[:-1] if turns[-1].role == "assistant" else turns
    parts: list[tuple[Turn, ...]] = []
    part: list[Turn] = []
    for turn, following in zip(given, [*given[1:], None], strict=True):
        part.append(turn)
        if turn.role in ("user", "tool") and (following is None or following.role == "user"):
            parts.append(tuple(part))
            part = []
    if part:
        raise InputFault(f"the last turn is of the {part[-1].role}: expected a user turn last, which the model answers")
    return tuple(parts)


def _plain(line: int, content: bytes) -> FilePrompt:
    text = content_of(text_of(content).rstrip("\r\n"), "the prompt")
    return FilePrompt(AnswerPrompt(line, ((Turn("user", text),),)), {})


def _parsed(line: int, content: bytes) -> FilePrompt:
    data = object_of(content, f"plain text goes into a file whose name ends with {TEXT_SUFFIX}")
    for name in ("fork", "ends"):
        flag_of(data, name)
    forms = [name for name in ("messages", "prompt", "text") if name in data]
    if forms == ["messages"]:
        turns = turns_of(data["messages"])
    elif forms == ["prompt"]:
        turns = (Turn("user", content_of(data["prompt"], '"prompt"')),)
    else:
        found = " and ".join(f'"{name}"' for name in forms) or "neither"
        raise InputFault(f"holds {found}: {_EXPECTED}" + (", not both" if len(forms) > 1 else ""))
    others = {name: value for name, value in data.items() if name not in _REPLACED}
    return FilePrompt(AnswerPrompt(line, parts_of(turns)), others)
