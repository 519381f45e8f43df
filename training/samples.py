"""Samples: conversations as token trees, with the tokens that have a loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.training.conversations import TEXT, Conversation, Turn
from spaceport.training.extract import Tree, extract

# Renders turns with the chat template; the second argument is add_generation_prompt.
Render = Callable[[Sequence[Turn], bool], str]

_LINE_END = "\n"
_PLACEHOLDER = "\ue000answer\ue000"  # replaces an answer to find what the template adds around it


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
                raise InputFault(
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
            raise InputFault(
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
            raise InputFault(
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
        raise InputFault("the checkpoint has no end-of-text token: expected eos_token_id in generation_config.json")
    rendering = render if tokenizer.chat_template else None
    return ConversationEncoder(encode, rendering, start_tokens(backend), tokens.end[0], tokens)


def start_tokens(backend: Any) -> tuple[int, ...]:
    """Special tokens that a tokenizer adds before a text."""
    bare: list[int] = backend.encode("a", add_special_tokens=False).ids
    whole: list[int] = backend.encode("a", add_special_tokens=True).ids
    return tuple(whole[: whole.index(bare[0])]) if bare and bare[0] in whole else ()


def _short(text: str) -> str:
    return ascii(text if len(text) <= 40 else text[:37] + "...")


NO_PARENT = -1

# Keys of the sample counts
FORKED, WHOLE, TRUNCATED = "forked", "unforked", "truncated at the cutoff"
NOT_FORKED = "not forked: "  # before the reason
CHILD_DROPPED = "children dropped: [Child] is beyond the cutoff"
TOO_LONG = "dropped: the answer begins beyond the cutoff"
TOO_SHORT = "dropped: no token with a loss"
CONTROL = "dropped: the text contains a mask, fork or child token"


@dataclass(frozen=True)
class Sample:
    """One training text as a token tree: the root thread and one child thread per [Fork]."""

    line: int  # of the data file
    ids: NDArray[np.int64]  # token ids
    parents: NDArray[np.int64]  # index of the previous token on the path, NO_PARENT for the first
    learned: NDArray[np.bool_]  # whether predicting this token from its parent has a loss

    @property
    def size(self) -> int:
        return int(self.ids.size)


@dataclass
class Prepared:
    """Samples of a data file, with counts."""

    forked: list[Sample] = field(default_factory=list)
    unforked: list[Sample] = field(default_factory=list)  # the same answers as in `forked`, without forks
    whole: list[Sample] = field(default_factory=list)  # answers without a paragraph tree, and plain texts
    counts: Counter[str] = field(default_factory=Counter)


class _SampleBuilder:
    """A sample under construction."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.parents: list[int] = []
        self.learned: list[bool] = []
        self._tip = NO_PARENT

    def add(self, ids: Sequence[int], learned: bool) -> None:
        """Append tokens to the current path."""
        if ids:
            first = len(self.ids)
            self.parents += [self._tip, *range(first, first + len(ids) - 1)]
            self.ids += ids
            self.learned += [learned] * len(ids)
            self._tip = len(self.ids) - 1

    def branch(self, child: Sequence[int], detail: Sequence[int]) -> None:
        """Append a child thread to the last token; later tokens continue the parent thread."""
        tip = self._tip
        self.add(child, learned=False)
        self.add(detail, learned=True)
        self._tip = tip

    def sample(self, line: int) -> Sample:
        learned = np.array(self.learned, np.bool_)
        learned[:1] = False  # the first token has no parent to predict it
        return Sample(line, np.array(self.ids, np.int64), np.array(self.parents, np.int64), learned)


def prepare(
    conversations: Sequence[Conversation],
    encoder: ConversationEncoder,
    cutoff: int,
    unforked: bool = False,
    before: Prepared | None = None,
) -> Prepared:
    """Turn conversations into samples; answers with a paragraph tree fork if the model has fork tokens.

    `unforked` adds each forked sample again without forks. `before` has the samples of other files, and gets these too.
    """
    prepared = before or Prepared()
    for conversation in conversations:
        try:
            samples, flat = _samples_of(conversation, encoder, cutoff, unforked, prepared.counts)
        except ContainsControlToken:
            prepared.counts[CONTROL] += 1
            continue
        if not samples:  # the tokenizer returned no tokens
            prepared.counts[TOO_SHORT] += 1
        forked = encoder.forks and any((sample.ids == encoder.tokens.fork).any() for sample in samples)
        fitting = [_within(sample, encoder, cutoff, prepared.counts) for sample in samples]
        found = [sample for sample in fitting if sample is not None]
        if forked and found:
            prepared.forked += found
            prepared.unforked += [_truncate(sample, encoder, cutoff) for sample in flat]
        else:
            prepared.whole += found
        prepared.counts[FORKED if forked else WHOLE] += len(found)
    return prepared


def prepare_files(
    texts: Mapping[Path, Sequence[Conversation]], encoder: ConversationEncoder, cutoff: int, unforked: bool = False
) -> Prepared:
    """Samples of the conversations of files."""
    prepared = Prepared()
    for file, conversations in texts.items():
        try:
            prepare(conversations, encoder, cutoff, unforked, prepared)
        except InputFault as error:
            raise InputFault(f"{file} {error}") from error
    return prepared


def _samples_of(
    conversation: Conversation, encoder: ConversationEncoder, cutoff: int, unforked: bool, counts: Counter[str]
) -> tuple[list[Sample], list[Sample]]:
    """Samples of a conversation, and the forked ones again without forks if `unforked`; why it has none is counted."""
    if conversation.turns[0].role == TEXT:
        return list(_windows(conversation, encoder, cutoff)), []
    exchanges = encoder.exchanges(conversation)
    tree = extract(exchanges[-1].answer) if encoder.forks and conversation.fork else None
    if not isinstance(tree, tuple):
        if tree is not None:
            counts[f"{NOT_FORKED}{tree}"] += 1
        return [_chat(conversation, exchanges, None, encoder)], []
    flat = [_chat(conversation, exchanges, None, encoder)] if unforked else []
    return [_chat(conversation, exchanges, tree, encoder)], flat


def _chat(
    conversation: Conversation, exchanges: Sequence[Exchange], tree: Tree | None, encoder: ConversationEncoder
) -> Sample:
    """One sample of all turns of a conversation; the last answer forks if it has a tree."""
    builder = _SampleBuilder()
    for exchange in exchanges:
        last = exchange is exchanges[-1]
        opening = encoder.start if encoder.render is None else ()
        before = encoder.encode_continuation(exchange.before) if builder.ids else encoder.encode_plain(exchange.before)
        builder.add([*opening, *before], learned=False)
        ending = encoder.answer_end(exchange.after)
        if last and tree is not None:
            _add_tree(builder, exchange.lead, tree, ending.end, conversation.ends, encoder)
        else:
            builder.add(encoder.encode_continuation(exchange.lead + exchange.answer), learned=True)
        if last and not conversation.ends:
            break
        if last or ending.rendered:
            builder.add(ending.end, learned=True)
        else:
            builder.branch((), ending.end)
        if not last:
            builder.add(ending.separator, learned=False)
    return builder.sample(conversation.line)


def _add_tree(
    builder: _SampleBuilder, lead: str, tree: Tree, end: Sequence[int], ends: bool, encoder: ConversationEncoder
) -> None:
    """Append the heads to the root thread; a head with a detail gets a [Fork] and a child thread with the detail.

    Each child thread ends with `end`, except that of the last paragraph if the answer does not end.
    """
    fork, child = encoder.tokens.fork, encoder.tokens.child
    for paragraph in tree:
        ending = end if ends or paragraph is not tree[-1] else ()
        builder.add(encoder.encode_continuation(lead + paragraph.head), learned=True)
        lead = ""
        if paragraph.detail is not None and fork is not None and child is not None:
            builder.add([fork], learned=True)
            builder.branch([child], [*encoder.encode_continuation(paragraph.detail), *ending])


def _windows(conversation: Conversation, encoder: ConversationEncoder, cutoff: int) -> Iterator[Sample]:
    """Windows of a plain text, each within the cutoff; the last one gets the end-of-text token."""
    pieces = list(_pieces(conversation.turns[0].content, encoder, cutoff - len(encoder.start) - 1))
    given = 0 if encoder.start else 1  # without start tokens the first token has no parent to predict it
    for piece in pieces:
        builder = _SampleBuilder()
        builder.add([*encoder.start, *piece[:given]], learned=False)
        builder.add(piece[given:], learned=True)
        if piece is pieces[-1] and conversation.ends:
            builder.add([encoder.end], learned=True)
        yield builder.sample(conversation.line)


def _pieces(text: str, encoder: ConversationEncoder, most: int) -> Iterator[list[int]]:
    """Token ids of windows of whole lines, each at most `most` tokens; a longer line is split."""
    window, size = "", 0
    for line in text.splitlines(keepends=True):
        more = len(encoder.encode_plain(line))
        if window and size + more > most:
            yield from _chunks(encoder.encode_plain(window), most)
            window, size = "", 0
        window, size = window + line, size + more
    yield from _chunks(encoder.encode_plain(window), most)


def _chunks(ids: Sequence[int], most: int) -> Iterator[list[int]]:
    yield from (list(ids[first : first + most]) for first in range(0, len(ids), most))


def _within(sample: Sample, encoder: ConversationEncoder, cutoff: int, counts: Counter[str]) -> Sample | None:
    """The sample truncated to the cutoff, or None if no token with a loss is left; both are counted."""
    cut = _truncate(sample, encoder, cutoff)
    if cut.size < sample.size:
        counts[TRUNCATED] += 1
        counts[CHILD_DROPPED] += int(
            (sample.ids == encoder.tokens.child).sum() - (cut.ids == encoder.tokens.child).sum()
        )
    if cut.learned.any():
        return cut
    counts[TOO_LONG if sample.learned.any() else TOO_SHORT] += 1
    return None


def _truncate(sample: Sample, encoder: ConversationEncoder, cutoff: int) -> Sample:
    """The sample without tokens at or beyond the cutoff, and without a [Child] that lost all its tokens."""
    if sample.size <= cutoff:
        return sample
    positions = np.zeros(sample.size, np.int64)
    for index, parent in enumerate(sample.parents):
        positions[index] = 0 if parent == NO_PARENT else positions[parent] + 1
    keep = positions < cutoff
    childless = sample.ids == encoder.tokens.child
    childless[sample.parents[keep & (sample.parents != NO_PARENT)]] = False
    keep &= ~childless
    indices = np.cumsum(keep) - 1
    parents = sample.parents[keep]
    moved = np.where(parents == NO_PARENT, NO_PARENT, indices[parents])
    return Sample(sample.line, sample.ids[keep], moved, sample.learned[keep])
