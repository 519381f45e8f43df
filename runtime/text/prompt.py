"""Prompt: encodes text, token ids or chat messages as tokens."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from numbers import Integral
from typing import cast

import numpy as np
from tokenizers import Tokenizer

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.isolation.process import HelperProcess
from spaceport.runtime.text.chat import ChatTemplate, Message, open_template, plain_messages
from spaceport.runtime.text.control_tokens import ControlTokens, Span
from spaceport.runtime.text.protected_messages import MessageProtector, ProtectedText, restored

_MOST_ITEMS = 2**20  # of a prompt, for models with shorter contexts; against endless sequences
_SHOWN = 1000  # items or characters of an argument whose whole repr is made

Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts as tokens of a bundle's model; raises if they are invalid.

    Special tokens that text or messages spell out stay text, unless `parse_special` is set.
    """

    bundle: Bundle
    tokenizer: Tokenizer
    helper: HelperProcess | None = None  # for templates that may take long

    @cached_property
    def controls(self) -> ControlTokens:
        """The control tokens of the bundle."""
        return ControlTokens(self.tokenizer, self.bundle.manifest.tokens)

    @cached_property
    def protector(self) -> MessageProtector:
        """Keeps the texts of messages from becoming control tokens."""
        return MessageProtector(self.controls)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template of the bundle."""
        return open_template(self.bundle, self.helper)

    def tokens_of(self, prompt: Prompt, parse_special: bool = False) -> list[int]:
        """The tokens of a prompt: text, token ids, or chat messages."""
        if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes | bytearray):
            raise OptionFault(f"the prompt is {shown(prompt)}: expected text, token ids or chat messages")
        if not len(prompt):
            raise OptionFault("the prompt is empty: expected at least one character, token id or message")
        if not isinstance(prompt, str):
            prompt = self._items(prompt)
        if isinstance(prompt, str):
            protected = () if parse_special else None
            ids = self.controls.ids(prompt, special=True, protected=protected)
        elif all(isinstance(item, Integral) for item in prompt):
            ids = [int(item) for item in prompt if isinstance(item, Integral)]
            if any(isinstance(item, bool) for item in prompt):
                raise OptionFault(f"the prompt is {shown(prompt)}: expected token ids, not True or False")
        elif any(isinstance(item, Integral) for item in prompt):
            raise OptionFault(f"the prompt is {shown(prompt)}: expected token ids or chat messages, not both")
        else:
            text, spans = self._rendered(prompt, parse_special)
            ids = self.controls.ids(text, special=False, protected=spans)
        self._check_tokens(ids)
        return ids

    def parts_of(
        self, prompt: Prompt, continuation: str | Sequence[int] | None, parse_special: bool = False
    ) -> tuple[list[int], int]:
        """The tokens of a prompt and its continuation, and the index of the first token to score."""
        if continuation is None:
            return self.tokens_of(prompt, parse_special), 1
        if not continuation:
            raise OptionFault("the continuation is empty: expected at least one token, or None to score the prompt")
        if not isinstance(continuation, str):
            ids = self.tokens_of(prompt, parse_special)
            return [*ids, *self.tokens_of(continuation)], len(ids)
        self.tokens_of(prompt, parse_special)  # raises if it is invalid
        if isinstance(prompt[0], int):
            raise OptionFault(
                "the prompt is token ids and the continuation is text: expected both as ids or both as text"
            )
        ids, start = self._joined(prompt, continuation, parse_special)
        if not 0 < start < len(ids):
            empty = "continuation" if start else "prompt"
            raise OptionFault(f"the {empty} has no token of its own: expected a longer text, or both as token ids")
        self._check_tokens(ids)
        return ids, start

    def _joined(self, prompt: Prompt, continuation: str, parse_special: bool) -> tuple[list[int], int]:
        """The tokens of prompt and continuation, and the index of the first that reaches into the continuation."""
        plain = isinstance(prompt, str)
        text, spans = ProtectedText(prompt) if isinstance(prompt, str) else self._rendered(prompt, parse_special)
        protected: tuple[Span, ...] | None = () if parse_special else None
        if not plain and not parse_special:
            protected = (*spans, (len(text), len(text) + len(continuation)))
        encoded = self.controls.encode(text + continuation, special=plain, protected=protected)
        return encoded.ids, encoded.first_beyond(len(text))

    def _items(self, prompt: Sequence[int] | Sequence[Message]) -> list[int] | list[Message]:
        """The items of a prompt, read once: a sequence of a caller's own may be endless, or differ each time."""
        most, length = max(_MOST_ITEMS, self.bundle.manifest.max_positions), len(prompt)
        items = list(islice(prompt, min(length, most) + 1))
        if len(items) > most:
            raise OptionFault(f"the prompt has {length} items: expected at most {most} token ids or messages")
        return cast("list[int] | list[Message]", items[:length])

    def _rendered(self, prompt: Sequence[int] | Sequence[Message], parse_special: bool) -> ProtectedText:
        messages: Sequence[Message] = plain_messages([item for item in prompt if not isinstance(item, int)])
        self.template.check_roles(messages)
        if parse_special:
            return ProtectedText(self.template.render(messages))
        messages, stand_ins = self.protector.protect(messages)
        return restored(self.template.render(messages), stand_ins)

    def _check_tokens(self, ids: Sequence[int]) -> None:
        vocab = self.bundle.manifest.signature.vocab_size
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise OptionFault(f"the prompt holds the token id {wrong}: expected ids from 0 to {vocab - 1}")
        if not ids:
            raise OptionFault("the prompt has no tokens: expected at least one")


def shown(given: object) -> str:
    """An argument as an error message quotes it."""
    long = isinstance(given, Sized) and len(given) > _SHOWN
    text = reprlib.repr(given) if long else repr(given)
    return text if len(text) <= 60 else f"{text[:59]}…"
