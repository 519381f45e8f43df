"""Prompt size: the number of characters of a prompt, known without tokenizing or copying it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from spaceport.runtime.text.chat_prompt import ChatPrompt

_PER_TOKEN = 4  # characters
_MOST_COUNTED = 65_536  # characters and values of messages


def characters_of(prompt: object, most: float = math.inf) -> int:
    """Number of characters of all texts of a prompt, counted until there are more than `most`.

    Each other value inside of messages counts as one, and each text as at least one; token ids do not count.
    """
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], int):
        return 0
    if isinstance(prompt, ChatPrompt):
        prompt = [prompt.messages, prompt.tools, prompt.template_kwargs]
    count, waiting = 0, [prompt]
    while waiting and count <= most:
        value = waiting.pop()
        count += max(1, len(value)) if isinstance(value, str) else 1
        if isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
    return count


def estimated_tokens(prompt: object) -> int:
    """About how many tokens a prompt has: a quarter of its characters, or its token ids.

    Messages are counted up to 65,536 characters and values, and their last text as a whole.
    """
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    if isinstance(prompt, tuple):  # a prompt and its continuation
        return sum(map(estimated_tokens, prompt))
    return characters_of(prompt, _MOST_COUNTED) // _PER_TOKEN
