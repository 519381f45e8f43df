"""Samples: conversations as token trees, with the tokens that have a loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spaceport.training.conversation_encoder import (
    ContainsControlToken,
    ConversationEncoder,
    Exchange,
)
from spaceport.training.conversations import TEXT, Conversation
from spaceport.training.extract import Tree, extract

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
    conversations: Sequence[Conversation], encoder: ConversationEncoder, cutoff: int, unforked: bool = False
) -> Prepared:
    """Turn conversations into samples; answers with a paragraph tree fork if the model has fork tokens.

    `unforked` adds each forked sample again without forks.
    """
    prepared = Prepared()
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


def _samples_of(
    conversation: Conversation, encoder: ConversationEncoder, cutoff: int, unforked: bool, counts: Counter[str]
) -> tuple[list[Sample], list[Sample]]:
    """Samples of a conversation, and the forked ones again without forks if `unforked`; why it has none is counted."""
    if conversation.turns[0].role == TEXT:
        return list(_windows(conversation, encoder, cutoff)), []
    exchanges = encoder.exchanges(conversation)
    tree = extract(exchanges[-1].answer) if encoder.forks and conversation.fork else None
    if not isinstance(tree, Tree):
        if tree is not None:
            counts[f"{NOT_FORKED}{tree.reason}"] += 1
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
    for paragraph in tree.paragraphs:
        ending = end if ends or paragraph is not tree.paragraphs[-1] else ()
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
    if keep.all():
        return sample
    childless = sample.ids == encoder.tokens.child
    childless[sample.parents[keep & (sample.parents != NO_PARENT)]] = False
    keep &= ~childless
    indices = np.cumsum(keep) - 1
    parents = sample.parents[keep]
    moved = np.where(parents == NO_PARENT, NO_PARENT, indices[parents])
    return Sample(sample.line, sample.ids[keep], moved, sample.learned[keep])
