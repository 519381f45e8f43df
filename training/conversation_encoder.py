"""Conversation encoder: tokenizes conversations with a model's tokenizer, chat template and special tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.training.conversations import Conversation, Turn

# Renders turns with the chat template; the second argument is add_generation_prompt.
Render = Callable[[Sequence[Turn], bool], str]

_LINE_END = "\n"
_PLACEHOLDER = "\ue000answer\ue000"  # replaces an answer to find what the template adds around it


class ConversationError(InputFault):
    """A conversation that the tokenizer or chat template cannot encode; the message names the line."""


class ContainsControlToken(ValueError):
    """Text that contains a mask, fork or child token literally."""


@dataclass(frozen=True)
class Exchange:
    """One assistant answer and the rendered text around it."""

    before: str  # from the end of the previous exchange to the end of the generation prompt
    lead: str  # rendered between the generation prompt and the answer
    answer: str
    after: str  # rendered after the answer


@dataclass(frozen=True)
class AnswerEnd:
    """Tokens after an answer."""

    end: list[int]  # up to and including the end-of-text token
    separator: list[int]  # between the end-of-text token and the next turn
    rendered: bool  # whether the template renders the end-of-text token, so that the next turn sees it


@dataclass(frozen=True)
class ConversationEncoder:
    """Encodes text and conversations as token ids of one model."""

    encode: Callable[[str], list[int]]  # adds no special tokens
    render: Render | None
    start: tuple[int, ...]  # special tokens before a plain text
    end: int  # end-of-text token where the template renders none
    tokens: TokenIds

    @property
    def forks(self) -> bool:
        return self.tokens.fork is not None

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text; raise if it contains a control token."""
        ids = self.encode(text)
        if not self._control.isdisjoint(ids):
            raise ContainsControlToken
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Token ids of a text that follows other text: some tokenizers add a leading space to every input."""
        if not self._adds_space:
            return self.encode_plain(text)
        opened = self.encode(_LINE_END)
        ids = self.encode_plain(_LINE_END + text)
        return ids[len(opened) :] if ids[: len(opened)] == opened else self.encode_plain(text)

    def answer_end(self, after: str) -> AnswerEnd:
        """Tokens after an answer, from the text that the template renders there."""
        ids = self.encode_continuation(after)
        ends = [index for index, token in enumerate(ids) if token in self.tokens.end]
        if not ends:
            return AnswerEnd([self.end], ids, rendered=False)
        return AnswerEnd(ids[: ends[0] + 1], ids[ends[0] + 1 :], rendered=True)

    def exchanges(self, conversation: Conversation) -> list[Exchange]:
        """All answers of a conversation, each with the rendered text around it."""
        turns = conversation.turns
        if self.render is None:
            return [self._without_template(conversation)]
        found: list[Exchange] = []
        done = ""  # rendered text of the exchanges so far
        for index, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            prompt = self._rendered(conversation, index, True)
            whole = self._rendered(conversation, index + 1, False)
            content = turn.content if turn.content in whole[len(prompt) :] else turn.content.strip()
            lead = self._lead(conversation, index, whole[len(prompt) :], content)
            after = whole[len(prompt + lead + content) :]
            if prompt + lead + content + after != whole:
                raise ConversationError(
                    f"line {conversation.line}: the chat template does not render the answer {_short(turn.content)} after "
                    "its generation prompt: expected a template whose answers begin with the generation prompt"
                )
            if not prompt.startswith(done):  # some templates rewrite earlier answers: these become context without loss
                found, done = [], ""
            found.append(Exchange(prompt[len(done) :], lead, content, after))
            done = whole
        return found

    def _lead(self, conversation: Conversation, index: int, rendered: str, content: str) -> str:
        """Text between the generation prompt and the answer; a short answer may occur in that text by chance."""
        first, last = rendered.partition(content)[0], rendered.rpartition(content)[0]
        if first == last:
            return first
        turns = (*conversation.turns[:index], Turn("assistant", _PLACEHOLDER))
        prompt, other = len(self._rendered(conversation, index, True)), replace(conversation, turns=turns)
        lead = self._rendered(other, index + 1, False)[prompt:].partition(_PLACEHOLDER)[0]
        return lead if rendered.startswith(lead + content) else first

    def _rendered(self, conversation: Conversation, count: int, generation_prompt: bool) -> str:
        """The first `count` turns of a conversation, rendered with the chat template."""
        assert self.render is not None
        try:
            return self.render(conversation.turns[:count], generation_prompt)
        except Exception as error:  # a template is a program and may raise anything
            raise ConversationError(
                f"line {conversation.line}: the chat template raised: {error}: expected turns that the model's template "
                "accepts; change or remove the line"
            ) from error

    @cached_property
    def _adds_space(self) -> bool:
        """Whether the tokenizer encodes a text differently at the start than after a newline."""
        return self.encode(_LINE_END + "a") != [*self.encode(_LINE_END), *self.encode("a")]

    @cached_property
    def _control(self) -> frozenset[int]:
        more = (self.tokens.fork, self.tokens.child)
        return frozenset((*self.tokens.mask, *(token for token in more if token is not None)))

    def _without_template(self, conversation: Conversation) -> Exchange:
        """A prompt and its response, concatenated, for a tokenizer without a chat template."""
        turns = conversation.turns
        if [turn.role for turn in turns] != ["user", "assistant"]:
            raise ConversationError(
                f"line {conversation.line}: has messages, but the tokenizer has no chat template: expected prompt and "
                "response, or a tokenizer with a chat template"
            )
        return Exchange(turns[0].content, "", turns[1].content, "")


def conversation_encoder(tokenizer: Any, tokens: TokenIds) -> ConversationEncoder:
    """Conversation encoder of a transformers tokenizer."""
    backend = tokenizer.backend_tokenizer

    def render(turns: Sequence[Turn], generation_prompt: bool) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=generation_prompt, tokenize=False)
        return text

    def encode(text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    if not tokens.end:
        raise ConversationError(
            "the checkpoint has no end-of-text token: expected eos_token_id in generation_config.json"
        )
    rendering = render if tokenizer.chat_template else None
    return ConversationEncoder(encode, rendering, start_tokens(backend), tokens.end[0], tokens)


def start_tokens(backend: Any) -> tuple[int, ...]:
    """Special tokens that a tokenizer adds before a text."""
    bare: list[int] = backend.encode("a", add_special_tokens=False).ids
    whole: list[int] = backend.encode("a", add_special_tokens=True).ids
    return tuple(whole[: whole.index(bare[0])]) if bare and bare[0] in whole else ()


def _short(text: str) -> str:
    return ascii(text if len(text) <= 40 else text[:37] + "...")
