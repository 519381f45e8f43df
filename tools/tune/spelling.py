"""Spelling: how conversations are written in the tokens of one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.tools.tune.conversations import Conversation, Turn

# The text of some turns by the chat template; the second argument asks it to go on to where the assistant begins.
Render = Callable[[Sequence[Turn], bool], str]

_LINE_END = "\n"
_STAND_IN = "\ue000answer\ue000"  # in the place of an answer; no template writes it of its own


class SpellingError(InputFault):
    """A conversation that a model's tokens or template cannot tell; the message names the line."""


class HoldsControl(ValueError):
    """A text that holds a mask, fork or child token: it would be taken for one of ours."""


@dataclass(frozen=True)
class Exchange:
    """One answer and what stands before it."""

    before: str  # from the end of the last exchange to where the assistant begins
    lead: str  # what the template writes between that and the answer's own text
    answer: str
    after: str  # what the template writes behind the answer


@dataclass(frozen=True)
class Ending:
    """The tokens behind an answer."""

    end: list[int]  # what ends it
    apart: list[int]  # what only separates it from the next turn
    written: bool  # whether the template writes the end, so that the next turn sees it


@dataclass(frozen=True)
class ConversationSpelling:
    """A model's tokenizer, chat template and special tokens, as far as writing conversations goes."""

    encode: Callable[[str], list[int]]  # adds no special tokens
    render: Render | None
    start: tuple[int, ...]  # what opens a plain text
    end: int  # ends what the template does not end itself
    tokens: TokenIds

    @property
    def forks(self) -> bool:
        return self.tokens.fork is not None

    def spell(self, text: str) -> list[int]:
        """The tokens of a text that holds none of ours."""
        ids = self.encode(text)
        if not self._control.isdisjoint(ids):
            raise HoldsControl
        return ids

    def go_on(self, text: str) -> list[int]:
        """The tokens of a text behind another: some tokenizers put a space before whatever they are given."""
        if not self._spaces:
            return self.spell(text)
        opened = self.encode(_LINE_END)
        ids = self.spell(_LINE_END + text)
        return ids[len(opened) :] if ids[: len(opened)] == opened else self.spell(text)

    def ending(self, after: str) -> Ending:
        """How an answer ends, by what the template writes behind it."""
        ids = self.go_on(after)
        ends = [place for place, token in enumerate(ids) if token in self.tokens.end]
        return Ending(ids[: ends[0] + 1], ids[ends[0] + 1 :], True) if ends else Ending([self.end], ids, False)

    def exchanges(self, conversation: Conversation) -> list[Exchange]:
        """The answers of a conversation, each with what stands before it."""
        turns = conversation.turns
        if self.render is None:
            return [self._bare(conversation)]
        found: list[Exchange] = []
        told = ""
        for place, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            asked = self._written(conversation, place, True)
            whole = self._written(conversation, place + 1, False)
            content = turn.content if turn.content in whole[len(asked) :] else turn.content.strip()
            lead = self._lead(conversation, place, whole[len(asked) :], content)
            after = whole[len(asked + lead + content) :]
            if asked + lead + content + after != whole:
                raise SpellingError(
                    f"line {conversation.line}: the chat template does not write the answer {_short(turn.content)} behind the "
                    "prompt for it: expected a template whose generation prompt is how its answers begin"
                )
            if not asked.startswith(told):  # some templates tell earlier answers otherwise: then they are context only
                found, told = [], ""
            found.append(Exchange(asked[len(told) :], lead, content, after))
            told = whole
        return found

    def _lead(self, conversation: Conversation, place: int, written: str, content: str) -> str:
        """What of the text behind the prompt stands before the answer: a short answer may stand in it by chance as well."""
        first, last = written.partition(content)[0], written.rpartition(content)[0]
        if first == last:
            return first
        turns = (*conversation.turns[:place], Turn("assistant", _STAND_IN))
        asked, other = len(self._written(conversation, place, True)), replace(conversation, turns=turns)
        lead = self._written(other, place + 1, False)[asked:].partition(_STAND_IN)[0]
        return lead if written.startswith(lead + content) else first

    def _written(self, conversation: Conversation, count: int, ask: bool) -> str:
        """The first turns of a conversation, as the template writes them."""
        assert self.render is not None
        try:
            return self.render(conversation.turns[:count], ask)
        except Exception as error:  # a template is a program of its own, which may raise anything
            raise SpellingError(
                f"line {conversation.line}: the chat template refuses it: {error}: expected turns that the model's template "
                "takes; change the line or leave it out"
            ) from error

    @cached_property
    def _spaces(self) -> bool:
        """Whether the tokenizer writes a text otherwise at the beginning than behind a line end."""
        return self.encode(_LINE_END + "a") != [*self.encode(_LINE_END), *self.encode("a")]

    @cached_property
    def _control(self) -> frozenset[int]:
        more = (self.tokens.fork, self.tokens.child)
        return frozenset((*self.tokens.mask, *(token for token in more if token is not None)))

    def _bare(self, conversation: Conversation) -> Exchange:
        """A prompt and its response where there is no template: one behind the other."""
        turns = conversation.turns
        if [turn.role for turn in turns] != ["user", "assistant"]:
            raise SpellingError(
                f"line {conversation.line}: messages, but the tokenizer has no chat template: expected prompt and response, "
                "or a tokenizer with a template"
            )
        return Exchange(turns[0].content, "", turns[1].content, "")


def spelling_of(tokenizer: Any, tokens: TokenIds) -> ConversationSpelling:
    """The spelling of a transformers tokenizer."""

    def render(turns: Sequence[Turn], ask: bool) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=ask, tokenize=False)
        return text

    return spelling_with(tokenizer.backend_tokenizer, render if tokenizer.chat_template else None, tokens)


def spelling_with(backend: Any, render: Render | None, tokens: TokenIds) -> ConversationSpelling:
    """The spelling of a tokenizer of the tokenizers library and a way to render turns."""

    def encode(text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    if not tokens.end:
        raise SpellingError(
            "the checkpoint names no end-of-text token: expected eos_token_id in generation_config.json"
        )
    return ConversationSpelling(encode, render, opening(backend), tokens.end[0], tokens)


def opening(backend: Any) -> tuple[int, ...]:
    """The special tokens that a tokenizer puts before a text."""
    bare: list[int] = backend.encode("a", add_special_tokens=False).ids
    whole: list[int] = backend.encode("a", add_special_tokens=True).ids
    return tuple(whole[: whole.index(bare[0])]) if bare and bare[0] in whole else ()


def _short(text: str) -> str:
    return ascii(text if len(text) <= 40 else text[:37] + "...")
