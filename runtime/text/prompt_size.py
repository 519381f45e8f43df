"""Prompt size: the number of characters of a prompt, known without tokenizing or copying it."""

from __future__ import annotations

import math
from collections.abc import Mapping


def characters_of(prompt: object, most: float = math.inf) -> int:
    """Number of characters of all texts of a prompt, counted until there are more than `most`; each value counts as one."""
    if isinstance(prompt, str):
        return len(prompt)
    count, waiting = 0, [prompt]
    while waiting and count <= most:
        value = waiting.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, Mapping):
            count += 1
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple) and value and not isinstance(value[0], int):
            count += 1
            waiting += value
    return count
