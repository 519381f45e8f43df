"""The prompts of a file, one per line, and their tokens for a model."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.messages import Message

_KEYS = ("messages", "prompt", "text")
_EXPECTED = 'expected one of "messages", "prompt" and "text"'
_LIST = re.compile(r'\s*\[\s*["{]')
_SEPARATOR = re.compile(r"[\s,]*")
# A fence, a heading before an empty line, a tag of HTML, or a character that no text has.
_DOCUMENT = re.compile(
    r"^(```|~~~).*|^#{1,6} .+(?=\r?\n[ \t]*\r?$)|^[ \t]*<(!doctype|html)\b.*|^.*\x00.*", re.MULTILINE | re.I
)


@dataclass(frozen=True)
class AuditPrompt:
    """One prompt of a file."""

    line: int  # line number in the file, from 1
    prompt: str | tuple[Message, ...]
    untemplated: str | None = None  # the prompt for a model without a chat template
    kind: str = ""  # what the prompt asks for, such as "code"; empty if the file does not say


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as token ids."""

    line: int  # line number in the file, from 1
    tokens: tuple[int, ...]


def read_prompts(path: Path) -> list[AuditPrompt]:
    """The prompts of a file, recognised by its content: a JSON list, a JSON object per line, or a line of text each."""
    if path.is_dir():
        raise InputFault(f"{path}: is a folder: expected a prompt file with one prompt per line")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputFault(f"{path} line {line}: not UTF-8 text ({error.reason}): save it as UTF-8") from error
    except OSError as error:
        raise InputFault(f"{path}: {error.strerror}: expected a prompt file with one prompt per line") from error
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InputFault(f"{path}: has no prompt: expected at least one line of text or JSON")
    if (prompts := _listed(path, text)) is not None:
        return prompts
    if lines[0][1].lstrip().startswith("{"):
        return [_prompt(path, number, _object(path, number, line)) for number, line in lines]
    if (document := _DOCUMENT.search(text)) is not None:
        raise InputFault(
            f"{path} line {text.count(chr(10), 0, document.start()) + 1}: {_shown(document[0].strip())} is part of a "
            'document, not a prompt: expected one prompt per line; write text of several lines as {"text": "..."}'
        )
    return [AuditPrompt(number, line) for number, line in lines]


def tokenize_prompts(
    runtime: Runtime, prompts: list[AuditPrompt], max_tokens: int, path: Path
) -> list[TokenizedPrompt]:
    """The prompts as token ids; raises for the first one that leaves no space for `max_tokens`.

    Long prompts are not skipped: they show errors of masks and positions first.
    """
    tokenized = []
    for prompt in prompts:
        tokens = tokens_of(runtime, prompt, path)
        if len(tokens) + max_tokens > runtime.max_seq_len:
            raise InputFault(
                f"{path} line {prompt.line}: {len(tokens)} prompt tokens and --max-tokens {max_tokens} make "
                f"{len(tokens) + max_tokens}, --max-seq-len is {runtime.max_seq_len}: shorten the prompt, lower --max-tokens, "
                f"or raise --max-seq-len (the model's maximum is {runtime.bundle.manifest.max_positions})"
            )
        tokenized.append(TokenizedPrompt(prompt.line, tuple(tokens)))
    return tokenized


def tokens_of(runtime: Runtime, prompt: AuditPrompt, path: Path) -> list[int]:
    """A prompt as token ids; raises for turns that the chat template refuses."""
    templated = TEMPLATE_FILE in runtime.bundle.manifest.files
    untemplated = None if templated else prompt.untemplated
    try:
        return runtime.tokens_of(prompt.prompt if untemplated is None else untemplated)
    except OptionFault as error:
        raise InputFault(f"{path} line {prompt.line}: {error}") from error


def _listed(path: Path, text: str) -> list[AuditPrompt] | None:
    """The prompts of a JSON list, each with the number of its first line; None if the text is none."""
    if not text.lstrip().startswith("["):
        return None
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        if not _LIST.match(text):  # plain text that begins with a bracket
            return None
        raise InputFault(f"{path}: not a JSON list ({error}): expected a list of prompts") from error
    prompts, end = [], text.index("[") + 1
    while text[start := _SEPARATOR.match(text, end).end()] != "]":  # type: ignore[union-attr]
        value, end = json.JSONDecoder().raw_decode(text, start)
        entry = {"text": value} if isinstance(value, str) else value
        prompts.append(_prompt(path, text.count("\n", 0, start) + 1, entry))
    if not prompts:
        raise InputFault(f"{path}: has no prompt: expected at least one entry in its list")
    return prompts


def _object(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputFault(
            f"{path} line {number}: not JSON ({error}): expected an object on each line, as on the first; write plain text as "
            '{"text": "..."}'
        ) from error


def _prompt(path: Path, number: int, data: Any) -> AuditPrompt:
    keys = [key for key in _KEYS if key in data] if isinstance(data, dict) else []
    if len(keys) != 1:
        found = " and ".join(f'"{key}"' for key in keys) or "none of them"
        raise InputFault(f"{path} line {number}: has {found}: {_EXPECTED}")
    value, kind = data[keys[0]], data.get("kind", "")
    if not isinstance(kind, str):
        raise InputFault(f'{path} line {number}: "kind" is {_shown(kind)}: expected text, such as "code"')
    if keys[0] == "messages":
        return AuditPrompt(number, _before_last_answer(path, number, value), kind=kind)
    if not isinstance(value, str) or not value.strip():
        raise InputFault(f'{path} line {number}: "{keys[0]}" is {_shown(value)}: expected text')
    if keys[0] == "text":
        return AuditPrompt(number, value, kind=kind)
    return AuditPrompt(number, ({"role": "user", "content": value},), value, kind)


def _before_last_answer(path: Path, number: int, messages: Any) -> tuple[Message, ...]:
    """All turns, without the last one if it is the assistant's."""
    turns = messages if isinstance(messages, list) else []
    if not turns or not all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns):
        raise InputFault(
            f'{path} line {number}: "messages" is {_shown(messages)}: expected a list of turns, each with "role" and "content"'
        )
    before = tuple(turns[:-1] if turns[-1]["role"] == "assistant" else turns)
    if not before:
        raise InputFault(f"{path} line {number}: the first turn is the assistant's: expected a user turn before it")
    return before


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
