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
from spaceport.runtime.isolation import HelperPool
from spaceport.runtime.text.chat import ChatTemplate, Message, open_template, plain_data, plain_messages
from spaceport.runtime.text.chat_prompt import ChatPrompt
from spaceport.runtime.text.content_parts import with_joined_parts
from spaceport.runtime.text.control_tokens import ControlTokens, MessageProtector, ProtectedText, Span, restored
from spaceport.runtime.text.final_message import cut_at_mark, with_end_mark
from spaceport.runtime.text.tokenizer import encoding_of
from spaceport.runtime.text.tool_messages import with_arguments

_MOST_ITEMS = 2**20  # of a prompt, for models with shorter contexts; against endless sequences
_SHOWN = 1000  # items or characters of an argument whose whole repr is made

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
    def protector(self) -> MessageProtector:
        """Keeps the texts of messages from becoming control tokens."""
        return MessageProtector(self.controls)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template of the bundle."""
        return open_template(self.bundle, self.helper)

    def tokens_of(
        self,
        prompt: Prompt,
        parse_special: bool = False,
        *,
        deadline: float | None = None,
        most: int | None = None,
    ) -> list[int]:
        """The tokens of a prompt: text, token ids, or chat messages.

        Raises `DeadlinePassed` if messages are not rendered until the deadline, and `TooManyTokens` for a long text that
        surely has more than `most` tokens.
        """
        if isinstance(prompt, ChatPrompt):
            return self._chat_tokens(prompt, parse_special, deadline, most)
        if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes | bytearray):
            raise OptionFault(f"the prompt is {shown(prompt)}: expected text, token ids or chat messages")
        if not len(prompt):
            raise OptionFault("the prompt is empty: expected at least one character, token id or message")
        if not isinstance(prompt, str):
            prompt = self._items(prompt)
        if isinstance(prompt, str):
            protected = () if parse_special else None
            self._check_length(prompt, most)
            ids = self.controls.ids(prompt, special=True, protected=protected)
        elif all(isinstance(item, Integral) for item in prompt):
            ids = [int(item) for item in prompt if isinstance(item, Integral)]
            if any(isinstance(item, bool) for item in prompt):
                raise OptionFault(f"the prompt is {shown(prompt)}: expected token ids, not True or False")
        elif any(isinstance(item, Integral) for item in prompt):
            raise OptionFault(f"the prompt is {shown(prompt)}: expected token ids or chat messages, not both")
        else:
            return self._chat_tokens(ChatPrompt(self._messages(prompt)), parse_special, deadline, most)
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
        if continuation is None:
            return self.tokens_of(prompt, parse_special, most=most), 1
        if not continuation:
            raise OptionFault("the continuation is empty: expected at least one token, or None to score the prompt")
        if not isinstance(continuation, str):
            ids = self.tokens_of(prompt, parse_special, most=most)
            return [*ids, *self.tokens_of(continuation)], len(ids)
        self.tokens_of(prompt, parse_special, most=most)  # raises if it is invalid
        self._check_length(continuation, most)
        if not isinstance(prompt, ChatPrompt) and isinstance(prompt[0], int):
            raise OptionFault(
                "the prompt is token ids and the continuation is text: expected both as ids or both as text"
            )
        ids, start = self._joined(prompt, continuation, parse_special)
        if not 0 < start < len(ids):
            empty = "continuation" if start else "prompt"
            raise OptionFault(f"the {empty} has no token of its own: expected a longer text, or both as token ids")
        self._check_tokens(ids)
        return ids, start

    def _chat_tokens(
        self, prompt: ChatPrompt, parse_special: bool, deadline: float | None, most: int | None
    ) -> list[int]:
        text, spans = self._rendered(prompt, parse_special, deadline)
        self._check_length(text, most)
        ids = self.controls.ids(text, special=False, protected=spans)
        self._check_tokens(ids)
        return ids

    def _joined(self, prompt: Prompt, continuation: str, parse_special: bool) -> tuple[list[int], int]:
        """The tokens of prompt and continuation, and the index of the first that reaches into the continuation."""
        plain = isinstance(prompt, str)
        if isinstance(prompt, str):
            text, spans = ProtectedText(prompt)
        else:
            chat = prompt if isinstance(prompt, ChatPrompt) else ChatPrompt(self._messages(prompt))
            text, spans = self._rendered(chat, parse_special)
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

    def _check_length(self, text: str, most: int | None) -> None:
        """Raise for a long text whose beginning has twice as many tokens as allowed, without tokenizing the rest."""
        if most is not None and len(text) > most * _LONG_TOKEN:
            count = len(encoding_of(self.tokenizer, text[: most * _LONG_TOKEN], special=False))
            if count > 2 * most:
                raise TooManyTokens(2 * most)

    def _rendered(self, prompt: ChatPrompt, parse_special: bool, deadline: float | None = None) -> ProtectedText:
        """The text of chat messages, whose own texts are protected unless `parse_special` is set."""
        messages = plain_messages(self._messages(prompt.messages))
        self.template.check_roles(messages)
        if not self.template.reads_parts:
            messages = with_joined_parts(messages)
        messages = with_arguments(messages, as_text=self.template.joins_arguments)
        stand_ins: dict[str, str] = {}
        variables = plain_data(prompt.variables, "tools and template_kwargs")
        if not parse_special:
            (messages, variables), stand_ins = self.protector.protect([messages, variables])
        if not prompt.continue_final_message:
            return restored(self.template.render(messages, prompt.asks, deadline, variables), stand_ins)
        messages, mark = with_end_mark(messages)
        text = self.template.render(messages, prompt.asks, deadline, variables)
        return restored(cut_at_mark(text, mark), stand_ins)

    def _messages(self, messages: Sequence[int] | Sequence[Message]) -> list[Message]:
        """The messages of a prompt, read once, without token ids among them."""
        return [item for item in self._items(messages) if not isinstance(item, int)]

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
