"""TOML text: entries of a TOML file from values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def entry(name: str, value: Any) -> str:
    """A name with its value."""
    key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)
    return f"{key} = {_spelled(value)}"


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return _text(str(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_spelled, value))}]"
    raise TypeError(f"{type(value).__name__} has no spelling in TOML: expected a number, a text, a path or a list")


def _text(value: str) -> str:
    """A string in TOML: as in JSON, which escapes all that TOML does but DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
