"""Checkpoint files: what a checkpoint's files must not do before its weights are loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spaceport.exporter.sar_config import CheckpointError

# Upper limits of the sizes in a configuration, by the names that families give them; far above every known model.
_LIMITS = {
    r"(num|n)_\w*layers?|n_layer|\w+_layers|depth": 4096,
    r"\w*heads?|\w*experts?|\w*experts_per_tok|\w*groups?": 2**16,
    r"\w*(size|dim|rank|embd|inner|ctx|positions?|embeddings|window)|d_\w+|dff": 2**31 - 1,
}
_ATTENTION = ("sdpa", "eager")


def refuse_special_files(folder: Path) -> None:
    """Raise for FIFOs, sockets and devices in a checkpoint folder: a library that opens them could wait forever."""
    for file in sorted(folder.iterdir()):
        if file.exists() and not file.is_file() and not file.is_dir():
            raise CheckpointError(f"{file}: not a regular file: expected files and folders only; remove it")


def refuse_sizes(file: Path, entries: dict[str, Any]) -> None:
    """Raise for sizes in a configuration that would fill the memory before the weights are read."""
    for name, value in _integers(entries):
        for pattern, most in _LIMITS.items():
            if abs(value) > most and re.fullmatch(pattern, name):
                shown = value if abs(value) < 10**30 else f"a number of {len(str(abs(value)))} digits"
                raise CheckpointError(f"{file}: {name} is {shown}: expected at most {most}")


def load_with_own_attention(load: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model and its loading report, with an attention implementation of transformers itself.

    The implementation is always passed, because a configuration can name one that is fetched or not installed.
    """
    for implementation in _ATTENTION:
        try:
            model, report = load(*arguments, attn_implementation=implementation, **options)
        except ValueError as error:
            if implementation == _ATTENTION[-1] or "scaled_dot_product_attention" not in str(error):
                raise
        else:
            return model, report
    raise AssertionError("the last implementation returns or raises")


def _integers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """All integers in parsed JSON, with the names of their entries."""
    waiting = [(name, value)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend((str(key), inner) for key, inner in value.items())
        elif isinstance(value, list):
            waiting.extend((name, inner) for inner in value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value
