"""Prompt: encodes text, token ids or chat messages as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
from tokenizers import Tokenizer

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.text.chat import Message, render
from spaceport.runtime.text.tokenizer import encode, encode_parts

Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts as tokens of a bundle's model; raises if they are invalid."""

    bundle: Bundle
    tokenizer: Tokenizer

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt: text, token ids, or chat messages."""
        if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes | bytearray):
            raise OptionFault(f"the prompt is {shown(prompt)}: expected text, token ids or chat messages")
        if not len(prompt):
            raise OptionFault("the prompt is empty: expected at least one character, token id or message")
        if isinstance(prompt, str):
            ids = encode(self.tokenizer, prompt, special=True)
        elif all(isinstance(item, Integral) for item in prompt):
            ids = [int(item) for item in prompt if isinstance(item, Integral)]
            if any(isinstance(item, bool) for item in prompt):
                raise OptionFault(f"the prompt is {shown(prompt)}: expected token ids, not True or False")
        elif any(isinstance(item, Integral) for item in prompt):
            raise OptionFault(f"the prompt is {shown(prompt)}: expected token ids or chat messages, not both")
        else:
            ids = encode(self.tokenizer, self._rendered(prompt), special=False)
        self._check_tokens(ids)
        return ids

    def parts_of(self, prompt: Prompt, continuation: str | Sequence[int] | None) -> tuple[list[int], int]:
        """The tokens of a prompt and its continuation, and the index of the first token to score."""
        ids = self.tokens_of(prompt)
        if continuation is None:
            return ids, 1
        if not continuation:
            raise OptionFault("the continuation is empty: expected at least one token, or None to score the prompt")
        if not isinstance(continuation, str):
            return [*ids, *self.tokens_of(continuation)], len(ids)
        if isinstance(prompt[0], int):
            raise OptionFault(
                "the prompt is token ids and the continuation is text: expected both as ids or both as text"
            )
        text = prompt if isinstance(prompt, str) else self._rendered(prompt)
        ids, start = encode_parts(self.tokenizer, text, continuation, special=isinstance(prompt, str))
        if not 0 < start < len(ids):
            empty = "continuation" if start else "prompt"
            raise OptionFault(f"the {empty} has no token of its own: expected a longer text, or both as token ids")
        self._check_tokens(ids)
        return ids, start

    def _rendered(self, prompt: Sequence[int] | Sequence[Message]) -> str:
        return render(self.bundle, [item for item in prompt if not isinstance(item, int)])

    def _check_tokens(self, ids: Sequence[int]) -> None:
        vocab = self.bundle.manifest.signature.vocab_size
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise OptionFault(f"the prompt holds the token id {wrong}: expected ids from 0 to {vocab - 1}")
        if not ids:
            raise OptionFault("the prompt has no tokens: expected at least one")


def shown(given: object) -> str:
    """An argument as an error message quotes it."""
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:59]}…"
