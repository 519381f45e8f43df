"""Encodes text, token ids or chat messages as the tokens of a prompt; special tokens which they spell out stay text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, islice
from numbers import Integral
from operator import not_
from typing import Any, NamedTuple, cast

import numpy as np
from tokenizers import AddedToken, Encoding, Tokenizer

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.isolation import HelperPool
from spaceport.runtime.text.chat_template import ChatTemplate, open_template
from spaceport.runtime.text.infill import InfillMarks, InfillPrompt, Span, ends_of, marks_of
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

_ATTEMPTS = 8  # a token that the model itself joins is split once more in each attempt
_MOST_ITEMS = 2**20  # of a prompt, for models with shorter contexts; against endless sequences
_LONG_TOKEN = 16  # characters; texts with fewer for each allowed token are tokenized as a whole

_STAND_INS = range(0x10F000, 0x10FFFD)  # private use characters


class Encoded(NamedTuple):
    """The tokens of a text, and where each ends in it."""

    ids: list[int]
    ends: list[int]  # characters of the text before the end of each token


class _Mark(NamedTuple):
    """Characters of the text that are encoded as a separator; none at the border of two characters."""

    start: int
    end: int
    token: int | None  # the control token that the separator stands for; None: it only separates two characters


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a bundle: encodes text, and protects messages, that spell them out without meaning them."""

    tokenizer: Tokenizer
    tokens: TokenIds

    @cached_property
    def spelled(self) -> dict[str, int]:
        """Id of each control token by its text: special tokens, and the mask, fork, child and end tokens.

        A token of the ordinary vocabulary is text, also if a bundle ends or forks with it.
        """
        tokens = self.tokens
        own = {*tokens.mask, *tokens.fork_ids, tokens.child, *tokens.end}
        added = self.tokenizer.get_added_tokens_decoder()
        return {
            entry.content: token
            for token, entry in added.items()
            if (entry.special or token in own) and entry.content.strip()
        }

    def ids(self, text: str, *, special: bool, protected: Sequence[Span] | None = None) -> list[int]:
        """The tokens of a text without control tokens in the `protected` characters, by default in the whole text.

        `special` adds the tokenizer's special tokens around the text.
        """
        return self._encoded(text, special, protected).ids

    def encode(self, text: str, *, special: bool, protected: Sequence[Span] | None = None) -> Encoded:
        """The tokens of a text as in `ids`, with their ends in the text."""
        encoded = self._encoded(text, special, protected)
        return encoded if isinstance(encoded, Encoded) else Encoded(encoded.ids, [end for _, end in encoded.offsets])

    def protect(self, messages: Any) -> tuple[Any, dict[str, str]]:
        """Messages with stand-ins for the control tokens that they spell out, and the text of each stand-in."""
        texts: list[str] = []
        _mapped(messages, texts.append)  # collects them
        if not any(map(self._spells, texts)):
            return messages, {}
        used = set("".join(texts))
        free_characters = (character for character in map(chr, _STAND_INS) if character not in used)
        stand_ins: dict[str, str] = {}  # by the text that each stands for

        def replaced(text: str) -> str:
            pieces, position = [], 0
            for start, end in self._fragments(text):
                fragment = text[start:end]
                if fragment not in stand_ins:
                    stand_ins[fragment] = next(free_characters, "")
                pieces += [text[position:start], stand_ins[fragment]]
                position = end
            return "".join([*pieces, text[position:]])

        protected = _mapped(messages, replaced)
        if "" in stand_ins.values():
            raise OptionFault(
                "the messages spell out control tokens and use all private use characters: leave one of them out"
            )
        return protected, {stand_in: text for text, stand_in in stand_ins.items()}

    def _encoded(self, text: str, special: bool, protected: Sequence[Span] | None) -> Encoding | Encoded:
        """The encoding of a text by the tokenizer alone, unless it makes control tokens of protected characters."""
        if not protected:
            encoding = encoding_of(self.tokenizer, text, special)
            ids = encoding.ids
            if protected is not None or self._ids.isdisjoint(ids):
                return encoding
            if self._ids.isdisjoint(compress(ids, map(not_, encoding.special_tokens_mask))):
                return encoding
        return self._separated(text, special, protected)

    def _found_in(self, text: str) -> list[_Mark]:
        """The control tokens that the tokenizer makes of a text."""
        encoding = encoding_of(self.tokenizer, text, special=False)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [_Mark(*span, token) for token, span in pairs if token in self._ids]

    def _separated(self, text: str, special: bool, protected: Sequence[Span] | None) -> Encoded:
        """The tokens of a text that would have control tokens in its protected characters."""
        marks: list[_Mark] = []
        if protected:  # the template's own control tokens are outside of these characters
            masked = list(text)
            for start, end in protected:
                masked[start:end] = "x" * (end - start)
            marks = self._found_in("".join(masked))
        for _ in range(_ATTEMPTS):
            encoded, joined = self._with_marks(text, marks, special)
            if not joined:
                return encoded
            for start, end in joined:
                if end - start < 2:
                    raise OptionFault(
                        f"character {start} of the prompt is {text[start:end]!r}, a control token: leave it out, or allow "
                        "control tokens with parse_special"
                    )
                middle = (start + end) // 2
                marks.append(_Mark(middle, middle, None))
            marks.sort()
        raise OptionFault("the prompt spells out control tokens: leave them out, or allow them with parse_special")

    def _with_marks(self, text: str, marks: Sequence[_Mark], special: bool) -> tuple[Encoded, list[Span]]:
        """The tokens of a text whose marks became separators, and the characters of unwanted control tokens."""
        pieces, position = [], 0
        for mark in marks:
            pieces += [text[position : mark.start], self._separator]
            position = mark.end
        encoding = encoding_of(self._plain, "".join([*pieces, text[position:]]), special)
        encoded, joined, left, shift = Encoded([], []), [], iter(marks), 0
        for token, (start, end), around in zip(
            encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True
        ):
            if token == self._separator_id:
                mark = next(left)
                shift += len(self._separator) - (mark.end - mark.start)
                if mark.token is None:
                    continue
                encoded.ids.append(mark.token)
                encoded.ends.append(mark.end)
                continue
            if not around and token in self._ids and not self._is_unknown(token, text[start - shift : end - shift]):
                joined.append((start - shift, end - shift))
            encoded.ids.append(token)
            encoded.ends.append(end - shift)
        return encoded, joined

    def _is_unknown(self, token: int, text: str) -> bool:
        """Whether a token stands for text that the model does not know."""
        model = self._settings["model"]
        unknown = model.get("unk_token", model.get("unk_id"))
        return unknown in (token, self.tokenizer.id_to_token(token)) and self.spelled.get(text) != token

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(self.spelled.values())

    @cached_property
    def _plain(self) -> Tokenizer:
        """The tokenizer without control tokens and with a separator; built for the first text that needs it."""
        added = [
            {**entry, "special": entry["special"] or entry["id"] in self._ids}
            for entry in self._settings["added_tokens"]
        ]
        tokenizer = Tokenizer.from_str(json.dumps({**self._settings, "added_tokens": added}))
        tokenizer.encode_special_tokens = True
        tokenizer.add_tokens([AddedToken(self._separator, normalized=False, special=False)])
        return tokenizer

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The content of the tokenizer's file."""
        settings: dict[str, Any] = json.loads(self.tokenizer.to_str())
        return settings

    @cached_property
    def _separator(self) -> str:
        return f"\U0010fffd{secrets.token_hex(16)}"  # no text contains it by chance, and none can be made to

    @cached_property
    def _separator_id(self) -> int:
        token = self._plain.token_to_id(self._separator)
        assert token is not None
        return token

    def _fragments(self, text: str) -> list[Span]:
        """The parts of a text that are a control token, or its beginning at the end of the text."""
        if not self._spells(text):
            return []
        spans = [match.span() for match in self._pattern.finditer(text)]
        if self.tokenizer.normalizer is not None:
            spans = _joined([*spans, *(mark[:2] for mark in self._found_in(text))])
        end = len(text.rstrip())
        start = end - self._beginning(text[:end])
        if start < end and not any(first < end and start < last for first, last in spans):
            spans.append((start, end))
        return spans

    def _spells(self, text: str) -> bool:
        """Whether a text may become a control token, alone or with text that follows."""
        if self._literal.search(text.lower()) or self._beginning(text.rstrip()):
            return True
        normalizer = self.tokenizer.normalizer
        return normalizer is not None and bool(self._literal.search(normalizer.normalize_str(text).lower()))

    def _beginning(self, text: str) -> int:
        """Number of characters at the end that may be the start of a control token."""
        sizes = range(min(self._longest, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:].lower() in self._beginnings), 0)

    @cached_property
    def _literal(self) -> re.Pattern[str]:
        return _any_of({text.lower() for text in self.spelled}, 0)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return _any_of(self.spelled, re.IGNORECASE)  # a template may change the case

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(text[:size].lower() for text in self.spelled for size in range(1, len(text)))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._beginnings), default=0)


def restored(text: str, stand_ins: Mapping[str, str]) -> tuple[str, tuple[Span, ...]]:
    """A rendered text with the original characters instead of their stand-ins, and where these are."""
    if not stand_ins:
        return text, ()
    pieces: list[str] = []
    spans: list[Span] = []
    length = 0
    for piece in re.split(f"([{''.join(stand_ins)}])", text):
        original = stand_ins.get(piece, piece)
        if original is not piece:
            spans.append((length, length + len(original)))
        pieces.append(original)
        length += len(original)
    return "".join(pieces), tuple(spans)


def _mapped(value: Any, change: Callable[[str], object]) -> Any:
    """A copy of messages with all their texts changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list) else value


def _any_of(texts: Any, flags: int) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)", flags)


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Spans in order, with overlapping ones as one."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif start < end:
            joined.append((start, end))
    return joined


Prompt = str | Sequence[int] | Sequence[Message] | ChatPrompt | InfillPrompt


class TooManyTokens(OptionFault):
    """A text has more tokens than allowed."""

    def __init__(self, count: int) -> None:
        super().__init__(f"the text has more than {count} tokens: shorten it")
        self.count = count


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts as tokens of a bundle's model; raises if they are invalid.

    Special tokens that text or messages spell out stay text, unless `parse_special` is set; so do those around a gap, but in
    a text that ends as a prompt of the model's own kind for one, as editors write it.
    """

    bundle: Bundle
    tokenizer: Tokenizer
    helper: HelperPool | None = None  # for templates that may take long

    @cached_property
    def controls(self) -> ControlTokens:
        return ControlTokens(self.tokenizer, self.bundle.manifest.tokens)

    @cached_property
    def infill(self) -> InfillMarks | None:
        """The marks around the gap of a text; None: the model was not trained to fill one."""
        return marks_of(self.tokenizer)

    def ends_of(self, prompt: Prompt) -> tuple[int, ...]:
        """Further tokens that end the answer to a prompt: those behind a filled gap."""
        if self.infill is None or not isinstance(prompt, str | InfillPrompt):
            return ()
        gap = isinstance(prompt, InfillPrompt) or self.infill.parts(prompt) is not None
        return ends_of(self.tokenizer, self.infill) if gap else ()

    @cached_property
    def template(self) -> ChatTemplate:
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
            ids = self.controls.ids(text, special=not isinstance(prompt, ChatPrompt), protected=protected)
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
        encoded = self.controls.encode(
            text + continuation, special=not isinstance(prompt, ChatPrompt), protected=protected
        )
        start = next((index for index, end in enumerate(encoded.ends) if end > len(text)), len(encoded.ids))
        if not 0 < start < len(encoded.ids):
            empty = "continuation" if start else "prompt"
            raise OptionFault(f"the {empty} has no token of its own: expected a longer text, or both as token ids")
        self._check_tokens(encoded.ids)
        return encoded.ids, start

    def _checked(self, prompt: Prompt) -> str | list[int] | ChatPrompt | InfillPrompt:
        """The prompt as text, token ids, messages with their options or a gap; raises if it is none of them."""
        if isinstance(prompt, ChatPrompt | InfillPrompt):
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
        self, prompt: str | ChatPrompt | InfillPrompt, parse_special: bool, deadline: float | None = None
    ) -> tuple[str, tuple[Span, ...] | None]:
        """The text of a prompt, and the characters that must not become control tokens; None: all of them."""
        if isinstance(prompt, InfillPrompt):
            if self.infill is None:
                raise OptionFault(
                    "the model was not trained to fill a gap: its tokenizer has no tokens for one; expected a prompt without a "
                    "text behind it"
                )
            return self.infill.written(prompt)
        if isinstance(prompt, str):
            return prompt, () if parse_special else self.infill and self.infill.parts(prompt)
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
