"""Draft: the candidates of a step as a tree with mask slots behind its nodes, and how such a tree grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from operator import attrgetter
from typing import Literal, NamedTuple, Protocol

from spaceport.graphs.contract.draft_methods import CAUSAL, MaskLayout
from spaceport.graphs.contract.phrases import CHANCES, PhraseTable, context_numbers
from spaceport.runtime.costs import Curve

Shape = Literal["chain", "tree"]
# Why a draft is narrower than its limits allow: drafts may not cost the request more time; further rows are not expected
# to be worth their time; no source proposes a token; the grammar allows no proposed token; the text reaches its token
# limit; the engine or the other threads take the rows; the requests of the call agreed on fewer rows.
Reason = Literal["budget", "not_worth_it", "no_candidates", "grammar", "end_of_text", "row_limit", "shared_call"]
_BLOCK = 64  # tokens that are compared at once


@dataclass(frozen=True)
class Candidates:
    """Candidates for one position: the most probable tokens, best first, with their probabilities."""

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]

    def behind(self, token: int) -> Candidates:
        """The candidates if this token is chosen for the position before."""
        return self


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens that two sequences begin with."""
    length, at = min(len(first), len(second)), 0
    while at + _BLOCK < length and first[at : at + _BLOCK] == second[at : at + _BLOCK]:
        at += _BLOCK
    while at < length and first[at] == second[at]:
        at += 1
    return at


MOST_LIKELY = 0.97  # maximum probability of a candidate, so that alternatives are still considered
Ranked = Sequence[tuple[float, int]]  # probability and token of each candidate, the most probable first


class Proposal(Protocol):
    """What one source proposes for the positions behind the last known token of a thread."""

    source: str  # name
    depths: int  # number of positions
    anywhere: bool  # whether it also continues the tokens of other sources

    def behind(self, depth: int, path: Sequence[int]) -> Ranked:
        """Its candidates at a depth, with their probabilities if the tokens before them are accepted.

        The path is the last known token, and the draft tokens up to this depth.
        """


class Phrases:
    """Tokens that mostly followed a few others in texts that were counted beforehand: the most probable one by context."""

    def __init__(self, table: PhraseTable) -> None:
        chances = (table.chances / CHANCES).tolist()
        self._following: dict[int, tuple[float, int]] = dict(
            zip(table.contexts.tolist(), zip(chances, table.tokens.tolist(), strict=True), strict=True)
        )

    def following(self, tokens: Sequence[int]) -> tuple[float, int] | None:
        """The probability and the token behind the longest known context; None: no context is known."""
        known = self._following
        for context in reversed(context_numbers(tokens)):
            if (found := known.get(context)) is not None:
                return found
        return None


@dataclass(frozen=True)
class DraftConfig:
    """Limits of the drafts of a request; they change its speed and never its output."""

    mask_slots: int = 0  # maximum mask slots behind a node
    shape: Shape = "tree"
    rows: int = 24  # maximum rows of a thread in a step of a tree; a chain has mask_slots + 1 full groups
    siblings: int = 3  # maximum candidates for one position, of all sources; 1: the draft is a chain
    lookup: int = 0  # maximum tokens from prompt lookup, and from phrases; 0: neither
    phrases: Phrases | None = None  # those of the bundle
    mask_layout: MaskLayout = CAUSAL
    heads: int = 0  # maximum draft tokens from heads; 0: none
    grammar: bool = False  # whether a grammar limits the candidates

    @cached_property
    def candidates(self) -> int:
        """Number of candidates to take from each mask slot or head."""
        return 1 if self.shape == "chain" else self.siblings


@dataclass(frozen=True)
class Draft:
    """Candidates for the tokens after the last known one; node 0 is that token, node 1 + i is candidate i."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # node before each candidate
    masks: tuple[int, ...] = (0,)  # mask slots behind each node
    sources: tuple[str, ...] = ()  # of each candidate: the names of all sources that propose it, such as "mask+lookup"
    worth: tuple[float, ...] = ()  # expected tokens of 1, 2, ... rows, the best rows first; empty: unknown
    order: tuple[int, ...] = ()  # of the rows after the first: the node of a mask row, or -1 for a candidate
    mask_layout: MaskLayout = CAUSAL
    limited: Reason | None = None  # why it is narrower than its limits allow; None: it is not

    @property
    def rows(self) -> int:
        rows = 1 + len(self.tokens) + sum(self.masks)
        if self.mask_layout.shift:
            return rows
        return rows + self.mask_layout.lead * (len(self.masks) - self.masks.count(0))

    def cut(self, rows: int, reason: Reason) -> Draft:
        """The draft with its best rows only, at most `rows`; a draft without an order of rows is not cut."""
        if not self.order or rows >= self.rows:
            return self
        order = self.order[: rows - 1]
        count, lead = order.count(-1), self.mask_layout.lead
        masks = [order.count(node) for node in range(count + 1)]
        return Draft(
            self.tokens[:count],
            self.parents[:count],
            tuple([max(0, mask_rows - lead) for mask_rows in masks]),
            self.sources[:count],
            self.worth[:rows],
            order,
            self.mask_layout,
            reason,
        )


PLAIN = Draft()  # of a thread whose drafter was not asked


def chain(
    candidates: Sequence[int],
    mask_slots: int,
    remaining: int,
    rows: int | None = None,
    mask_layout: MaskLayout = CAUSAL,
    source: str = "mask",
) -> Draft:
    """SPACE's draft: a chain of candidates, and the same number of mask slots behind every node.

    `remaining` is the number of tokens that the thread may still generate; nothing is drafted beyond it. `rows` is the
    maximum number of rows, that of the last known token included.
    """
    tokens = tuple(candidates[: max(0, remaining - 1)])
    if rows is not None:
        tokens = tokens[: rows - 1]
        mask_slots = min(mask_slots, rows // (len(tokens) + 1) - 1 - mask_layout.lead)
    parents = tuple(range(len(tokens)))
    masks = tuple(max(0, min(mask_slots, remaining - 2 - depth)) for depth in range(len(tokens) + 1))
    return Draft(tokens, parents, masks, (source,) * len(tokens), mask_layout=mask_layout)


class Outlook(NamedTuple):
    """What the rows of a tree cost, and what mask slots are worth."""

    curve: Curve
    rate: float  # tokens per plain step that are generated otherwise
    gains: Sequence[float]  # tokens: value of the first, the second, ... draft token in the next step
    last: int = 0  # the last known token, before the draft


def tree(
    proposals: Sequence[Proposal],
    draft_config: DraftConfig,
    remaining: int,
    rows: int,
    outlook: Outlook,
    bound: Reason = "row_limit",
) -> Draft:
    """The draft whose rows have the highest value for their time.

    The value of a candidate is its acceptance probability. The value of a mask slot is a draft token in the next step,
    times the probability that its node is the last accepted one. `rows` is the maximum, the last known token included;
    `bound` is the reason for this maximum.
    """
    return _Growth(proposals, draft_config, remaining, outlook).grown(rows, bound)


def opening_gains(gains: Sequence[float], lead: int) -> list[float]:
    """By maximum number of mask slots: the highest average value of a row if a group is opened, with its `lead` rows."""
    sums = accumulate(gains)
    return list(accumulate((total / (count + lead) for count, total in enumerate(sums, 1)), max))


@lru_cache(maxsize=256)
def joined(names: tuple[str, ...], by: int) -> str:
    """The names whose bits are set, such as "mask+lookup"."""
    return "+".join(name for bit, name in enumerate(names) if by >> bit & 1)


class _Node(NamedTuple):
    """The last known token or a candidate, and what may follow it."""

    depth: int
    reached: float  # probability that it is accepted
    last: float  # probability that it is the last accepted one
    choices: Ranked  # candidates behind it, the most probable first
    by: Sequence[int]  # of each of these: a bit for each source that proposes it
    path: tuple[int, ...]  # the last known token, and the candidates up to this one


class _Growth:
    """A tree that grows row by row; the heap holds the possible next rows: candidates and mask slots."""

    def __init__(self, proposals: Sequence[Proposal], config: DraftConfig, remaining: int, outlook: Outlook) -> None:
        self._proposals, self._names = proposals, tuple(map(attrgetter("source"), proposals))
        self._config, self._remaining, self._outlook = config, remaining, outlook
        self._lead = 0 if config.mask_layout.shift else config.mask_layout.lead
        self._openings = opening_gains(outlook.gains, self._lead) if self._lead else []
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._sources: list[str] = []
        self._order: list[int] = []  # by row: the node of a mask row, or -1 for a candidate
        self._masks: list[int] = []  # by node
        self._nodes: list[_Node] = []
        # value, number, node, rank of a candidate or -1: a mask slot
        self._heap: list[tuple[float, int, int, int]] = []
        self._offered = 0
        self._least = outlook.rate * outlook.curve.least  # minimum value of a row in any step
        self._limited: Reason = "no_candidates"

    def grown(self, rows: int, bound: Reason) -> Draft:
        """The tree with the best number of rows, at most `rows`."""
        (curve, rate, gains, last), lead = self._outlook, self._lead
        times, slopes, rows = curve.times, curve.slopes, min(rows, len(curve.times))
        worth, used, best_rows, best = [1.0], 1, 1, 1.0 - rate * times[0]
        self._add_node(0, 1.0, (last,), -1)
        while used < rows and self._heap:
            negative, _, node, rank = heappop(self._heap)
            if -negative < rate * slopes[used - 1]:
                self._limited = "not_worth_it"
                break
            value = -negative
            if rank >= 0:
                self._add_candidate(node, rank, value)
            else:
                needed = 1 if self._masks[node] else 1 + lead
                if used + needed > rows:
                    self._limited = bound
                    continue
                if needed > 1:
                    value = self._nodes[node].last * gains[0]
                    used += lead
                    worth += [worth[-1]] * lead
                self._order += [node] * needed
                self._masks[node] += 1
                self._offer(node, -1)
            used += 1
            worth.append(worth[-1] + value)
            if worth[-1] - rate * times[used - 1] > best:
                best_rows, best = used, worth[-1] - rate * times[used - 1]
        draft = Draft(
            tuple(self._tokens),
            tuple(self._parents),
            tuple(self._masks),
            tuple(self._sources),
            tuple(worth),
            tuple(self._order),
            self._config.mask_layout,
            self._limited if used < rows else bound if rows < self._config.rows else None,
        )
        return draft.cut(best_rows, "not_worth_it") if best_rows < used else draft

    def _add_candidate(self, parent: int, rank: int, reached: float) -> None:
        depth, _, _, choices, by, path = self._nodes[parent]
        token = choices[rank][1]
        self._order.append(-1)
        self._tokens.append(token)
        self._parents.append(parent)
        self._sources.append(joined(self._names, by[rank]))
        if rank + 1 < len(choices):
            self._offer(parent, rank + 1)
        self._add_node(depth + 1, reached, (*path, token), by[rank])

    def _add_node(self, depth: int, reached: float, path: tuple[int, ...], sources: int) -> None:
        """Add a node that is reached with this probability, and offer the rows behind it."""
        choices: Ranked = ()
        by: Sequence[int] = ()
        last, siblings, bit = 1.0, self._config.siblings, 1
        for proposal in self._proposals:
            if (sources & bit or proposal.anywhere) and depth < proposal.depths:
                ranked = proposal.behind(depth, path)[:siblings]
                if ranked:
                    last *= 1 - ranked[0][0]
                    choices, by = _merged(choices, by, ranked, bit) if choices else (ranked, [bit] * len(ranked))
                elif self._config.grammar:
                    self._limited = "grammar"
            bit *= 2
        node = len(self._nodes)
        self._nodes.append(_Node(depth, reached, reached * last, choices[:siblings], by, path))
        self._masks.append(0)
        if choices:
            self._offer(node, 0)
        if self._config.mask_slots:
            self._offer(node, -1)

    def _offer(self, node: int, rank: int) -> None:
        """Offer the candidate of this rank behind a node, or one more mask slot for rank -1."""
        depth, reached, last, choices, *_ = self._nodes[node]
        if rank >= 0:
            fits, value = depth + 1 < self._remaining, reached * choices[rank][0]
        else:
            index, most = self._masks[node], min(self._config.mask_slots, self._remaining - 2 - depth)
            if index == self._config.mask_slots:
                return
            fits, opens = index < most, self._lead and not index
            value = last * (self._openings[most - 1] if opens and fits else self._outlook.gains[index])
        if not fits:
            self._limited = "end_of_text"
        elif value > self._least:  # among equals, the first comes first
            self._offered += 1
            heappush(self._heap, (-value, self._offered, node, rank))
        else:
            self._limited = "not_worth_it"


def _merged(choices: Ranked, by: Sequence[int], ranked: Ranked, bit: int) -> tuple[Ranked, list[int]]:
    """The candidates of several sources, the most probable first; those that another source proposes as well are joined."""
    chances = {token: probability for probability, token in choices}
    sources = dict(zip(chances, by, strict=True))
    for probability, token in ranked:
        chances[token] = max(chances.pop(token, 0.0), probability)
        sources[token] = sources.get(token, 0) | bit
    order = sorted(chances, key=chances.__getitem__, reverse=True)
    return [(chances[token], token) for token in order], [sources[token] for token in order]
