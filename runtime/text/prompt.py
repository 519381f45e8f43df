"""Encodes text, token ids or chat messages as the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from numbers import Integral
from typing import cast

import numpy as np
from tokenizers import Tokenizer

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.isolation import HelperPool
from spaceport.runtime.text.chat_template import ChatTemplate, open_template
from spaceport.runtime.text.control_tokens import ControlTokens, Span, restored
from spaceport.runtime.text.messages import (
    ChatPrompt,
    Message,
    cut_at_mark,
    plain_data,
    plain_messages,
    shown,
    with_arguments,
    with_end_mark,
    with_joined_parts,
)
from spaceport.runtime.text.tokenizer import encoding_of

_MOST_ITEMS = 2**20  # of a prompt, for models with shorter contexts; against endless sequences
_LONG_TOKEN = 16  # characters; texts with fewer for each allowed token are tokenized as a whole

Prompt = str | Sequence[int] | Sequence[Message] | ChatPrompt


class TooManyTokens(OptionFault):
    """A text has more tokens than allowed."""

    def __init__(self, count: int) -> None:
        super().__init__(f"the text has more than {count} tokens: shorten it")
        self.count = count


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts as tokens of a bundle's model; raises if they are invalid.

    Special tokens that text or messages spell out stay text, unless `parse_special` is set.
    """

    bundle: Bundle
    tokenizer: Tokenizer
    helper: HelperPool | None = None  # for templates that may take long

    @cached_property
    def controls(self) -> ControlTokens:
        """The control tokens of the bundle."""
        return ControlTokens(self.tokenizer, self.bundle.manifest.tokens)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template of the bundle."""
        return open_template(self.bundle, self.helper)

    def tokens_of(
        self, prompt: Prompt, parse_special: bool = False, *, deadline: float | None = None, most: int | None = None
    ) -> list[int]:
        """The tokens of a prompt: text, token ids, or chat messages.

        Raises `DeadlinePassed` if messages are not rendered until the deadline, and `TooManyTokens` for a long text that
        surely has more than `most` tokens.
        """
        prompt = self._checked(prompt)
        if isinstance(prompt, list):
            ids = prompt
        else:
            text, protected = self._text(prompt, parse_special, deadline)
            self._check_length(text, most)
            ids = self.controls.ids(text, special=isinstance(prompt, str), protected=protected)
        self._check_tokens(ids)
        return ids

    def parts_of(
        self,
        prompt: Prompt,
        continuation: str | Sequence[int] | None,
        parse_special: bool = False,
        *,
        most: int | None = None,
    ) -> tuple[list[int], int]:
        """The tokens of a prompt and its continuation, and the index of the first token to score."""
        if continuation is not None and not continuation:
            raise OptionFault("the continuation is empty: expected at least one token, or None to score the prompt")
        prompt = self._checked(prompt)
        ids = self.tokens_of(prompt, parse_special, most=most)
        if continuation is None:
            return ids, 1
        if not isinstance(continuation, str):
            return [*ids, *self.tokens_of(continuation)], len(ids)
        self._check_length(continuation, most)
        if isinstance(prompt, list):
            raise OptionFault(
                "the prompt is token ids and the continuation is text: expected both as ids or both as text"
            )
        text, protected = self._text(prompt, parse_special)
        if isinstance(prompt, ChatPrompt) and not parse_special:
            protected = (*(protected or ()), (len(text), len(text) + len(continuation)))
        encoded = self.controls.encode(text + continuation, special=isinstance(prompt, str), protected=protected)
        start = next((index for index, end in enumerate(encoded.ends) if end > len(text)), len(encoded.ids))
        if not 0 < start < len(encoded.ids):
            empty = "continuation" if start else "prompt"
            raise OptionFault(f"the {empty} has no token of its own: expected a longer text, or both as token ids")
        self._check_tokens(encoded.ids)
        return encoded.ids, start

    def _checked(self, prompt: Prompt) -> str | list[int] | ChatPrompt:
        """The prompt as text, token ids or messages with their options; raises if it is none of them."""
        if isinstance(prompt, ChatPrompt):
            return prompt
        if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes | bytearray):
            raise OptionFault(f"the prompt is {shown(prompt)}: expected text, token ids or chat messages")
        if not len(prompt):
            raise OptionFault("the prompt is empty: expected at least one character, token id or message")
        if isinstance(prompt, str):
            return prompt
        items = self._items(prompt)
        ids = [int(item) for item in items if isinstance(item, Integral)]
        if not ids:
            return ChatPrompt(cast("list[Message]", items))
        if len(ids) < len(items):
            raise OptionFault(f"the prompt is {shown(items)}: expected token ids or chat messages, not both")
        if any(isinstance(item, bool) for item in items):
            raise OptionFault(f"the prompt is {shown(items)}: expected token ids, not True or False")
        return ids

    def _items(self, prompt: Sequence[int] | Sequence[Message]) -> list[int] | list[Message]:
        """The items of a prompt, read once: a sequence of a caller's own may be endless, or differ each time."""
        most, length = max(_MOST_ITEMS, self.bundle.manifest.max_positions), len(prompt)
        items = list(islice(prompt, min(length, most) + 1))
        if len(items) > most:
            raise OptionFault(f"the prompt has {length} items: expected at most {most} token ids or messages")
        return cast("list[int] | list[Message]", items[:length])

    def _check_length(self, text: str, most: int | None) -> None:
        """Raise for a long text whose beginning has twice as many tokens as allowed, without tokenizing the rest."""
        if most is not None and len(text) > most * _LONG_TOKEN:
            count = len(encoding_of(self.tokenizer, text[: most * _LONG_TOKEN], special=False))
            if count > 2 * most:
                raise TooManyTokens(2 * most)

    def _text(
        self, prompt: str | ChatPrompt, parse_special: bool, deadline: float | None = None
    ) -> tuple[str, tuple[Span, ...] | None]:
        """The text of a prompt, and the characters that must not become control tokens; None: all of them."""
        if isinstance(prompt, str):
            return prompt, () if parse_special else None
        messages = plain_messages(cast("list[Message]", self._items(prompt.messages)))
        self.template.check_roles(messages)
        if not self.template.reads_parts:
            messages = with_joined_parts(messages)
        messages = with_arguments(messages, as_text=self.template.joins_arguments)
        variables = plain_data(prompt.variables, "tools and template_kwargs")
        stand_ins: dict[str, str] = {}
        if not parse_special:
            (messages, variables), stand_ins = self.controls.protect([messages, variables])
        if not prompt.continue_final_message:
            return restored(self.template.render(messages, prompt.asks, deadline, variables), stand_ins)
        messages, mark = with_end_mark(messages)
        text = self.template.render(messages, prompt.asks, deadline, variables)
        return restored(cut_at_mark(text, mark), stand_ins)

    def _check_tokens(self, ids: Sequence[int]) -> None:
        vocab = self.bundle.manifest.signature.vocab_size
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise OptionFault(f"the prompt holds the token id {wrong}: expected ids from 0 to {vocab - 1}")
        if not ids:
            raise OptionFault("the prompt has no tokens: expected at least one")
