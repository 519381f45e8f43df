"""Draft: the candidates of a step as a tree, and how many masks stand behind each of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from typing import Literal

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.engine import PROCESSOR

Shape = Literal["chain", "tree"]
Source = Literal["mask", "lookup", "both"]  # who proposed a candidate

_FIRST_ODDS, _LATER_ODDS = 0.7, 0.85  # of a mask slot before anything was seen of it: of the first, and of each after
_LOOKUP_ODDS = 0.6
_NEWS = 0.1  # weight of what was just seen against what was seen before
_FORGETTING = 0.01  # of what was not tried lately: so that it is tried again
_LEAST_TRUST = 0.1
_MOST_ODDS = 0.97  # no prediction is so sure that nothing needs to be ready for its failure


@dataclass(frozen=True)
class Guess:
    """What a mask slot says comes at one place: its likeliest tokens, best first, and how likely each of them is."""

    tokens: tuple[int, ...]
    odds: tuple[float, ...]


@dataclass(frozen=True)
class Drafting:
    """How the threads of a request draft; it changes how long a text takes and never what it is."""

    mask_slots: int = 0  # most mask slots behind a node
    shape: Shape = "tree"
    rows: int = 24  # most rows of a thread in a step; a chain has (mask_slots + 1)²
    siblings: int = 3  # most candidates for one place, whoever proposed them; 1: the draft is one line
    lookup: int = 0  # most tokens that are looked up in the text so far; 0: none are
    row_cost: float = PROCESSOR.row  # what a row adds to a step, in steps of one row

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("siblings", 1), ("lookup", 0)):
            if (given := getattr(self, name)) < least:
                raise OptionFault(f"draft {name} is {given}: expected at least {least}")
        if self.shape not in ("chain", "tree"):
            raise OptionFault(f"draft shape is {self.shape!r}: expected chain or tree")

    @property
    def guesses(self) -> int:
        """How many tokens of each mask slot are of use."""
        return 1 if self.shape == "chain" else self.siblings


@dataclass(frozen=True)
class Draft:
    """Candidates for the tokens after the last known one; node 0 is that token, node 1 + i is candidate i."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # node before each candidate
    masks: tuple[int, ...] = (0,)  # mask slots behind each node
    sources: tuple[Source, ...] = ()  # of each candidate
    odds: tuple[float, ...] = ()  # that each candidate is accepted, as far as it was thought about


PLAIN = Draft()
_MASK: Source = "mask"


@dataclass
class Rates:
    """How often drafts were right lately."""

    masks: list[float] = field(default_factory=list)  # by place: how often the tokens up to it were all accepted
    lookup: float = _LOOKUP_ODDS  # of a looked-up token behind one that was accepted
    tokens: float = 1.0  # of a step
    rows: float = 1.0  # of a step
    promised: float = _FIRST_ODDS  # by the mask slots, of the first candidates
    kept: float = _FIRST_ODDS  # of that promise

    @property
    def trust(self) -> float:
        """What the odds that mask slots tell are to be multiplied with: some are too sure of themselves."""
        return min(1.0, max(_LEAST_TRUST, self.kept / self.promised))

    def worth(self, row_cost: float) -> float:
        """How many tokens a row has to promise: as many as are written otherwise in the time that it takes."""
        return row_cost * max(1.0, self.tokens / (1 + row_cost * (self.rows - 1)))

    def of(self, mask_slots: int) -> list[float]:
        """The rate at each place of a group of mask slots; no place is better than those before it."""
        while len(self.masks) < mask_slots:
            self.masks.append(_first_rate(len(self.masks)))
        return list(accumulate(self.masks, min))

    def heard(self, draft: Draft, guesses: int, accepted: Sequence[int]) -> None:
        """There were guesses for so many places, a draft was made of them, and these nodes of it were accepted."""
        self.tokens += _NEWS * (len(accepted) + 1 - self.tokens)
        self.rows += _NEWS * (1 + len(draft.tokens) + sum(draft.masks) - self.rows)
        sources = [draft.sources[node - 1] for node in accepted]
        first = [i for i, parent in enumerate(draft.parents) if parent == 0 and draft.sources[i] != "lookup"]
        if first:
            self.promised += _NEWS * (sum(draft.odds[i] for i in first) / self.trust - self.promised)
            self.kept += _NEWS * ((sources[:1] in (["mask"], ["both"])) - self.kept)
        by_mask = [*(source == "mask" for source in sources), False].index(False)
        for place in range(len(self.masks)):
            if place < guesses:  # what was not worth a row counts as wrong: its mask slot was in vain
                self.masks[place] += _NEWS * ((place < by_mask) - self.masks[place])
            else:
                self.masks[place] += _FORGETTING * (_first_rate(place) - self.masks[place])
        by_lookup = [*(source != "mask" for source in sources), False].index(False)
        tried = sum(source != "mask" for source in draft.sources)
        for place in range(min(tried, by_lookup + 1)):
            self.lookup += _NEWS * ((place < by_lookup) - self.lookup)


def _first_rate(place: int) -> float:
    return _FIRST_ODDS * _LATER_ODDS**place


def chain(candidates: Sequence[int], mask_slots: int, room: int, rows: int | None = None) -> Draft:
    """SPACE's draft: one line of candidates, and the same number of mask slots behind every node.

    `room` is how many tokens the text may still grow by: what could only be written beyond it is not drafted. `rows` is
    how many rows there may be, that of the last known token among them.
    """
    tokens = tuple(candidates[: max(0, room - 1)])
    if rows is not None:
        tokens = tokens[: rows - 1]
        mask_slots = min(mask_slots, rows // (len(tokens) + 1) - 1)
    parents = tuple(range(len(tokens)))
    masks = tuple(max(0, min(mask_slots, room - 2 - depth)) for depth in range(len(tokens) + 1))
    return Draft(tokens, parents, masks, (_MASK,) * len(tokens))


def tree(
    guesses: Sequence[Guess], looked_up: Sequence[int], drafting: Drafting, room: int, rows: int, rates: Rates
) -> Draft:
    """The rows that promise the most tokens, best first, while there are rows and a row promises enough.

    A candidate promises that it is accepted. A mask slot promises a token of the next step, for which that has to feed a
    row in turn, if the node that it stands behind is the last one that is accepted.
    """
    growth = _Growth(guesses, looked_up, drafting, room, rates)
    growth.grow(rows - 1)
    return Draft(
        tuple(growth.tokens), tuple(growth.parents), tuple(growth.masks), tuple(growth.sources), tuple(growth.odds)
    )


class _Growth:
    """A tree that grows row by row; the heap holds what could come next: a candidate or a mask slot."""

    def __init__(
        self, guesses: Sequence[Guess], looked_up: Sequence[int], drafting: Drafting, room: int, rates: Rates
    ) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.masks: list[int] = [0]
        self.sources: list[Source] = []
        self.odds: list[float] = []
        self._guesses, self._looked_up, self._rates = guesses, looked_up, rates
        self._mask_slots, self._siblings, self._room = drafting.mask_slots, drafting.siblings, room
        self._mask_rates = rates.of(drafting.mask_slots)
        self._worth, self._trust = rates.worth(drafting.row_cost), rates.trust
        self._nodes: dict[tuple[int, int], int] = {}  # parent and token -> node
        self._followers = [0]  # candidates behind each node
        self._heap: list[tuple[float, int, Source | None, int, int, int, float]] = []
        self._offered = 0

    def grow(self, rows: int) -> None:
        """Add so many rows at most."""
        self._behind(0, 0, 1.0, guessed=True)
        self._offer("lookup", 0, 0, 0, 1.0)
        while rows and self._heap:
            promise, _, source, node, depth, rank, odds = heappop(self._heap)
            if source is None:
                self.masks[node] += 1
                self._offer_mask(node, depth, odds)
                rows -= 1
                continue
            if source == "mask":
                self._offer(source, node, depth, rank + 1, odds)
            rows -= self._add(source, node, depth, rank, -promise)

    def _add(self, source: Source, parent: int, depth: int, rank: int, odds: float) -> int:
        """A candidate behind a node: one row, unless the other source has proposed it already or there are enough."""
        token = self._guesses[depth].tokens[rank] if source == "mask" else self._looked_up[depth]
        node = self._nodes.get((parent, token))
        fresh = node is None
        if node is None:
            if self._followers[parent] == self._siblings:
                return 0
            self._followers[parent] += 1
            self._followers.append(0)
            node = self._nodes[parent, token] = len(self.masks)
            self.tokens.append(token)
            self.parents.append(parent)
            self.masks.append(0)
            self.sources.append(source)
            self.odds.append(odds)
        else:
            self.sources[node - 1] = "both"
        if source == "lookup":
            self._offer(source, node, depth + 1, 0, odds)
            if fresh:
                more = depth + 1 < len(self._looked_up)
                self._offer_mask(node, depth + 1, odds * (1 - min(_MOST_ODDS, self._rates.lookup) if more else 1))
        else:
            self._behind(node, depth + 1, odds, guessed=fresh)
        return int(fresh)

    def _behind(self, node: int, depth: int, odds: float, guessed: bool) -> None:
        """Offer what may follow a node that so many candidates lead to."""
        last = odds
        if depth < len(self._guesses) and self._guesses[depth].tokens:
            self._offer("mask", node, depth, 0, odds)
            last *= 1 - self._odds(depth, 0)
        if node == 0 and self._looked_up:
            last *= 1 - min(_MOST_ODDS, self._rates.lookup)
        if guessed:
            self._offer_mask(node, depth, last)

    def _offer(self, source: Source, node: int, depth: int, rank: int, odds: float) -> None:
        """Offer the candidate of this rank for the place behind a node that is reached with these odds."""
        if depth + 1 >= self._room:
            return
        if source == "lookup":
            if depth < len(self._looked_up):
                self._push(odds * self._rates.lookup, source, node, depth, rank, odds)
        elif rank < min(self._siblings, len(self._guesses[depth].tokens)):
            self._push(odds * self._odds(depth, rank), source, node, depth, rank, odds)

    def _odds(self, depth: int, rank: int) -> float:
        """Of a mask slot's token, behind one that was accepted."""
        return min(_MOST_ODDS, self._guesses[depth].odds[rank]) * self._trust

    def _offer_mask(self, node: int, depth: int, odds: float) -> None:
        """Offer one mask slot more behind a node that is the last accepted one with these odds."""
        place = self.masks[node]
        if place < min(self._mask_slots, self._room - 2 - depth):
            self._push(odds * (self._mask_rates[place] - self._worth), None, node, depth, 0, odds)

    def _push(self, promise: float, source: Source | None, node: int, depth: int, rank: int, odds: float) -> None:
        if promise >= self._worth:
            self._offered += 1  # of equals the first comes first
            heappush(self._heap, (-promise, self._offered, source, node, depth, rank, odds))
