"""Prompts: the folders of the demos, and the named prompts in a checkpoint's prompts.json."""

from __future__ import annotations

import json
from pathlib import Path

from spaceport.graphs.contract.faults import InputFault
from spaceport.runtime.text.prompt import Prompt

MODEL = Path(__file__).resolve().parent / "model"
CODER = MODEL.with_name("coder")  # prompts for a model that writes code
PROMPTS_FILE = "prompts.json"


def prompts_of(checkpoint: Path) -> dict[str, Prompt]:
    """The prompts of a folder's prompts.json by name: plain text, the user message of a chat, or all its messages."""
    if not checkpoint.is_dir():
        raise InputFault(f"{checkpoint}: no such folder: expected a checkpoint")
    file = checkpoint / PROMPTS_FILE
    if not file.exists():
        raise InputFault(f"{checkpoint}: no {PROMPTS_FILE} in it: give a prompt with --prompt")
    prompts: dict[str, Prompt] = {}
    try:
        for name, value in json.loads(file.read_text("utf-8")).items():
            if not isinstance(value, str):
                value = value.get("messages") or [{"role": "user", "content": value["user"]}]
            prompts[name] = value
        if not prompts:
            raise ValueError("no prompt")
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise InputFault(
            f"{file} has other content ({error!r:.60}): expected an object of names and prompts, "
            'each a text, {"user": text} or {"messages": [...]}'
        ) from error
    return prompts
