"""Prompts: the demo model's folder, and the named prompts that a checkpoint ships in prompts.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spaceport.graphs.contract.faults import InputFault
from spaceport.runtime.text.prompt import Prompt

MODEL = Path(__file__).parent / "model"
PROMPTS_FILE = "prompts.json"


def prompts_of(checkpoint: Path) -> dict[str, Prompt]:
    """The prompts in a checkpoint's prompts.json by name: plain texts, or one user message of a chat."""
    file = checkpoint / PROMPTS_FILE
    if not file.exists():
        raise InputFault(f"{checkpoint}: no {PROMPTS_FILE} in it: name a prompt with --prompt")
    try:
        found = json.loads(file.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputFault(f"{file}: not JSON that can be read: {error}") from error
    prompts = {name: _prompt(value) for name, value in found.items()} if isinstance(found, dict) else {}
    if not prompts or not all(prompts.values()):
        raise InputFault(f'{file}: expected an object of names and prompts, each a text or {{"user": text}}')
    return prompts


def _prompt(value: Any) -> Prompt:
    """The prompt that a JSON value stands for; an empty one if the value is invalid."""
    if isinstance(value, dict) and list(value) == ["user"] and isinstance(value["user"], str) and value["user"]:
        return [{"role": "user", "content": value["user"]}]
    return value if isinstance(value, str) else ""
