"""Samples: conversations as packed token trees, with the tokens that carry loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spaceport.tools.tune.conversations import TEXT, Conversation
from spaceport.tools.tune.extract import Tree, extract
from spaceport.tools.tune.spelling import ConversationSpelling, Exchange, HoldsControl

NO_PARENT = -1

# What is counted while conversations become samples.
FORKED, WHOLE, CUT = "forked", "unforked", "cut at the cutoff"
CHILD_LOST = "children dropped: [Child] lies beyond the cutoff"
TOO_LONG = "dropped: the answer begins beyond the cutoff"
TOO_SHORT = "dropped: nothing to learn in it"
CONTROL = "dropped: the text holds a mask, fork or child token"


@dataclass(frozen=True)
class Sample:
    """One text as a tree of tokens: the spine and, behind each [Fork], a child; a place is an index of the arrays."""

    line: int  # of the data file
    ids: NDArray[np.int64]
    parents: NDArray[np.int64]  # place of the token before it on its path, NO_PARENT for the first
    learned: NDArray[np.bool_]  # whether its parent learns to predict it

    @property
    def size(self) -> int:
        return int(self.ids.size)


@dataclass
class Prepared:
    """The samples of a data file, and what was met on the way."""

    forked: list[Sample] = field(default_factory=list)
    unforked: list[Sample] = field(default_factory=list)  # the forked ones once more, each in one line
    whole: list[Sample] = field(default_factory=list)  # answers with no tree, and plain texts
    counts: Counter[str] = field(default_factory=Counter)


class _Growing:
    """A sample under way."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.parents: list[int] = []
        self.learned: list[bool] = []
        self._tip = NO_PARENT

    def add(self, ids: Sequence[int], learned: bool) -> None:
        """Go on with these tokens."""
        if ids:
            first = len(self.ids)
            self.parents += [self._tip, *range(first, first + len(ids) - 1)]
            self.ids += ids
            self.learned += [learned] * len(ids)
            self._tip = len(self.ids) - 1

    def branch(self, child: Sequence[int], detail: Sequence[int]) -> None:
        """Let a child, of which the detail is learned, hang from the last token, and stay there."""
        tip = self._tip
        self.add(child, learned=False)
        self.add(detail, learned=True)
        self._tip = tip

    def sample(self, line: int) -> Sample:
        learned = np.array(self.learned, np.bool_)
        learned[:1] = False  # nothing stands before it: some tokenizers know no token of a prompt
        return Sample(line, np.array(self.ids, np.int64), np.array(self.parents, np.int64), learned)


def prepare(
    conversations: Sequence[Conversation], spelling: ConversationSpelling, cutoff: int, unforked: bool = False
) -> Prepared:
    """Every conversation as samples; an answer with a paragraph tree forks if the model has the tokens for it.

    `unforked` asks for the forked ones once more in one line."""
    prepared = Prepared()
    for conversation in conversations:
        try:
            samples, flat = _spelled(conversation, spelling, cutoff, unforked)
        except HoldsControl:
            prepared.counts[CONTROL] += 1
            continue
        if not samples:  # a text that the tokenizer knows nothing of
            prepared.counts[TOO_SHORT] += 1
        forked = spelling.forks and any((sample.ids == spelling.tokens.fork).any() for sample in samples)
        kept = [_kept(sample, spelling, cutoff, prepared.counts) for sample in samples]
        found = [sample for sample in kept if sample is not None]
        if forked and found:
            prepared.forked += found
            prepared.unforked += [_cut(sample, spelling, cutoff) for sample in flat]
        else:
            prepared.whole += found
        prepared.counts[FORKED if forked else WHOLE] += len(found)
    return prepared


def _spelled(
    conversation: Conversation, spelling: ConversationSpelling, cutoff: int, unforked: bool
) -> tuple[list[Sample], list[Sample]]:
    """The samples of a conversation; if one forks and it is asked for, the same in one line."""
    if conversation.turns[0].role == TEXT:
        return list(_windows(conversation, spelling, cutoff)), []
    exchanges = spelling.exchanges(conversation)
    tree = extract(exchanges[-1].answer) if spelling.forks and conversation.fork else None
    if not isinstance(tree, Tree):
        return [_chat(conversation, exchanges, None, spelling)], []
    flat = [_chat(conversation, exchanges, None, spelling)] if unforked else []
    return [_chat(conversation, exchanges, tree, spelling)], flat


def _chat(
    conversation: Conversation, exchanges: Sequence[Exchange], tree: Tree | None, spelling: ConversationSpelling
) -> Sample:
    """All answers of a conversation with what stands before them; the last one forks if it has a tree."""
    growing = _Growing()
    for exchange in exchanges:
        last = exchange is exchanges[-1]
        opening = spelling.start if spelling.render is None else ()
        before = spelling.go_on(exchange.before) if growing.ids else spelling.spell(exchange.before)
        growing.add([*opening, *before], learned=False)
        ending = spelling.ending(exchange.after)
        if last and tree is not None:
            _grow(growing, exchange.lead, tree, ending.end, spelling)
        else:
            growing.add(spelling.go_on(exchange.lead + exchange.answer), learned=True)
        if last or ending.written:
            growing.add(ending.end, learned=True)
        else:
            growing.branch((), ending.end)
        if not last:
            growing.add(ending.apart, learned=False)
    return growing.sample(conversation.line)


def _grow(growing: _Growing, lead: str, tree: Tree, end: Sequence[int], spelling: ConversationSpelling) -> None:
    """The heads as the spine; behind each that has a detail a [Fork], whose child writes it."""
    fork, child = spelling.tokens.fork, spelling.tokens.child
    for paragraph in tree.paragraphs:
        growing.add(spelling.go_on(lead + paragraph.head), learned=True)
        lead = ""
        if paragraph.detail is not None and fork is not None and child is not None:
            growing.add([fork], learned=True)
            growing.branch([child], [*spelling.go_on(paragraph.detail), *end])


def _windows(conversation: Conversation, spelling: ConversationSpelling, cutoff: int) -> Iterator[Sample]:
    """A plain text in pieces of at most the cutoff; the last one ends."""
    pieces = list(_pieces(conversation.turns[0].content, spelling, cutoff - len(spelling.start) - 1))
    given = 0 if spelling.start else 1  # with nothing before it, a first token cannot be learned
    for piece in pieces:
        growing = _Growing()
        growing.add([*spelling.start, *piece[:given]], learned=False)
        growing.add(piece[given:], learned=True)
        if piece is pieces[-1] and conversation.ends:
            growing.add([spelling.end], learned=True)
        yield growing.sample(conversation.line)


def _pieces(text: str, spelling: ConversationSpelling, room: int) -> Iterator[list[int]]:
    """The tokens of as many whole lines as there is room for; a line that is longer is cut where it must be."""
    window, size = "", 0
    for line in text.splitlines(keepends=True):
        more = len(spelling.spell(line))
        if window and size + more > room:
            yield from _cut_tokens(spelling.spell(window), room)
            window, size = "", 0
        window, size = window + line, size + more
    yield from _cut_tokens(spelling.spell(window), room)


def _cut_tokens(ids: Sequence[int], room: int) -> Iterator[list[int]]:
    yield from (list(ids[first : first + room]) for first in range(0, len(ids), room))


def _kept(sample: Sample, spelling: ConversationSpelling, cutoff: int, counts: Counter[str]) -> Sample | None:
    """The sample within the cutoff, or nothing if that leaves nothing to learn; either is counted."""
    kept = _cut(sample, spelling, cutoff)
    if kept.size < sample.size:
        counts[CUT] += 1
        counts[CHILD_LOST] += int(
            (sample.ids == spelling.tokens.child).sum() - (kept.ids == spelling.tokens.child).sum()
        )
    if kept.learned.any():
        return kept
    counts[TOO_LONG if sample.learned.any() else TOO_SHORT] += 1
    return None


def _cut(sample: Sample, spelling: ConversationSpelling, cutoff: int) -> Sample:
    """The sample without what stands at the cutoff or beyond, and without a [Child] that nothing is left of."""
    if sample.size <= cutoff:
        return sample
    positions = np.zeros(sample.size, np.int64)
    for place, parent in enumerate(sample.parents):
        positions[place] = 0 if parent == NO_PARENT else positions[parent] + 1
    keep = positions < cutoff
    if keep.all():
        return sample
    bare = sample.ids == spelling.tokens.child
    bare[sample.parents[keep & (sample.parents != NO_PARENT)]] = False
    keep &= ~bare
    places = np.cumsum(keep) - 1
    parents = sample.parents[keep]
    moved = np.where(parents == NO_PARENT, NO_PARENT, places[parents])
    return Sample(sample.line, sample.ids[keep], moved, sample.learned[keep])
