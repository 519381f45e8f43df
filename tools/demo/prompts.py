"""Prompts: the folder of the demo model, and the named prompts in a checkpoint's prompts.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spaceport.graphs.contract.faults import InputFault
from spaceport.runtime.text.prompt import Prompt

MODEL = Path(__file__).resolve().parent / "model"
PROMPTS_FILE = "prompts.json"


def prompts_of(checkpoint: Path) -> dict[str, Prompt]:
    """The prompts of a folder's prompts.json by name: plain text, the user message of a chat, or all its messages."""
    if not checkpoint.is_dir():
        raise InputFault(f"{checkpoint}: no such folder: expected a checkpoint")
    file = checkpoint / PROMPTS_FILE
    if not file.exists():
        raise InputFault(f"{checkpoint}: no {PROMPTS_FILE} in it: give a prompt with --prompt")
    try:
        found = json.loads(file.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputFault(f"{file}: not valid JSON: {error}") from error
    prompts = {name: _prompt(value) for name, value in found.items()} if isinstance(found, dict) else {}
    if not prompts or not all(prompts.values()):
        raise InputFault(
            f'{file}: expected an object of names and prompts, each a string, {{"user": string}} or {{"messages": [...]}}'
        )
    return prompts


def _prompt(value: Any) -> Prompt:
    """The prompt of a JSON value; empty if the value is invalid."""
    if isinstance(value, dict) and list(value) == ["user"] and isinstance(value["user"], str) and value["user"]:
        return [{"role": "user", "content": value["user"]}]
    messages = value.get("messages") if isinstance(value, dict) and len(value) == 1 else None
    if isinstance(messages, list) and all(_is_message(message) for message in messages):
        return messages
    return value if isinstance(value, str) else ""


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"role", "content"} and all(map(_is_text, value.values()))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""
