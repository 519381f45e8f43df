"""The draft tree with the highest expected gain for the time of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, count

from spaceport.runtime.costs import Curve
from spaceport.runtime.decode.draft import Candidates, Draft, DraftConfig, Reason, Source

_MOST = 0.97  # maximum probability of a prediction, so that alternatives are still considered
_MANY = 1 << 30


@dataclass(frozen=True)
class Outlook:
    """Inputs of a plan: cost of rows, acceptance probabilities, and value of draft tokens."""

    curve: Curve
    rate: float  # tokens per plain step that are generated otherwise
    gains: Sequence[float]  # tokens: value of the first, the second, ... draft token in the next step
    # by depth: factor for the probabilities of mask slots; the last one applies to all deeper ones
    trust: Sequence[float] = ()
    lookup: Sequence[float] = ()  # by depth: probability of a lookup token behind an accepted one
    last: int = 0  # the last known token, before the draft
    mask_limit: int = _MANY  # maximum rows of a draft to which another mask slot is added
    limit: Reason | None = None  # why a draft has no more than its maximum rows


def tree(
    candidates: Sequence[Candidates],
    lookup_tokens: Sequence[int],
    draft_config: DraftConfig,
    remaining: int,
    rows: int,
    outlook: Outlook,
) -> Draft:
    """The draft whose rows have the highest value for their time.

    The value of a candidate is its acceptance probability. The value of a mask slot is a draft token in the next step,
    times the probability that its node is the last accepted one. `rows` is the maximum, the last known token included.
    """
    return _Growth(candidates, lookup_tokens, draft_config, remaining, outlook).grown(rows)


def opening_gains(gains: Sequence[float], lead: int) -> list[float]:
    """By maximum number of mask slots: the highest average value of a row if a group is opened, with its `lead` rows."""
    sums = accumulate(gains)
    return list(accumulate((total / (count + lead) for count, total in enumerate(sums, 1)), max))


class _Growth:
    """A tree that grows row by row; the heap holds the possible next rows: candidates and mask slots."""

    def __init__(
        self,
        candidates: Sequence[Candidates],
        lookup_tokens: Sequence[int],
        config: DraftConfig,
        remaining: int,
        outlook: Outlook,
    ) -> None:
        self._candidates, self._lookup_tokens, self._outlook = candidates, lookup_tokens, outlook
        self._config, self._remaining = config, remaining
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._masks = [0]
        self._sources: list[Source] = []
        self._probabilities: list[float] = []
        self._order: list[int] = []  # by row: the node of a mask row, or -1 for a candidate
        self._openings = opening_gains(outlook.gains, config.mask_layout.lead)
        self._nodes: dict[tuple[int, int], int] = {}  # parent and token -> node
        self._of_masks: dict[int, Candidates] = {}  # candidates of mask slots behind each node
        self._followers = [0]  # candidates behind each node
        self._heap: list[tuple[float, int, Source | None, int, int, int, float]] = []
        self._numbers = count()
        self._least = outlook.rate * outlook.curve.least  # minimum value of a row in any step
        self._limited: Reason = "no_candidates"

    def grown(self, rows: int) -> Draft:
        """The tree with the best number of rows, at most `rows`."""
        outlook, worth, used = self._outlook, [1.0], 1
        times, slopes, rate = outlook.curve.times, outlook.curve.slopes, outlook.rate
        best_count, best, rows = 1, 1.0 - rate * times[0], min(rows, len(times))
        self._behind(0, 0, 1.0, with_mask=True)
        self._offer("lookup", 0, 0, 0, 1.0)
        while used < rows and self._heap:
            promise, _, source, node, depth, rank, probability = heappop(self._heap)
            if -promise < rate * slopes[used - 1]:
                self._limited = "not_worth_it"
                break
            if source is None:
                needed = used + self._rows_of_slot(node)
                if needed > min(rows, outlook.mask_limit):
                    self._limited = "budget" if needed <= rows else self._limited
                    continue
                values = self._add_mask(node, depth, probability)
            else:
                values = self._add(source, node, depth, rank, probability, -promise)
            for value in values:
                used += 1
                worth.append(worth[-1] + value)
                if worth[-1] - rate * times[used - 1] > best:
                    best_count, best = used, worth[-1] - rate * times[used - 1]
        draft = Draft(
            tuple(self._tokens),
            tuple(self._parents),
            tuple(self._masks),
            tuple(self._sources),
            tuple(self._probabilities),
            tuple(worth),
            tuple(self._order),
            self._config.mask_layout,
            outlook.limit if used >= rows else self._limited,
        )
        return draft.cut(best_count, "not_worth_it")

    def _rows_of_slot(self, node: int) -> int:
        """Rows of one more mask slot behind a node."""
        return 1 if self._masks[node] else 1 + self._config.mask_layout.lead

    def _add_mask(self, node: int, depth: int, probability: float) -> tuple[float, ...]:
        """Add a mask slot behind a node; returns the value of each of its rows."""
        rows, value = self._rows_of_slot(node), probability * self._outlook.gains[self._masks[node]]
        self._order.extend([node] * rows)
        self._masks[node] += 1
        self._offer_mask(node, depth, probability)
        return (*(0.0,) * (rows - 1), value)

    def _add(
        self, source: Source, parent: int, depth: int, rank: int, reached: float, probability: float
    ) -> tuple[float, ...]:
        """Add a candidate behind a node, unless the other source has proposed it or the node has enough siblings."""
        if source == "lookup":
            token = self._lookup_tokens[depth]
        else:
            token = self._of_masks[parent].tokens[rank]
            self._offer(source, parent, depth, rank + 1, reached)
        node = self._nodes.get((parent, token))
        fresh = node is None
        if node is None:
            if self._followers[parent] == self._config.siblings:
                return ()
            self._followers[parent] += 1
            self._followers.append(0)
            node = self._nodes[parent, token] = len(self._masks)
            self._order.append(-1)
            self._tokens.append(token)
            self._parents.append(parent)
            self._masks.append(0)
            self._sources.append(source)
            self._probabilities.append(probability)
        else:
            self._sources[node - 1] = "both"
        if source == "lookup":
            self._offer(source, node, depth + 1, 0, probability)
            if fresh:
                self._offer_mask(node, depth + 1, probability * (1 - self._lookup_probability(depth + 1)))
        else:
            self._behind(node, depth + 1, probability, with_mask=fresh)
        return (probability,) if fresh else ()

    def _behind(self, node: int, depth: int, probability: float, with_mask: bool) -> None:
        """Offer the possible rows behind a node that is reached with this probability."""
        last = probability
        if depth < len(self._candidates):
            before = self._tokens[node - 1] if node else self._outlook.last
            behind = self._of_masks[node] = self._candidates[depth].behind(before)
            if behind.tokens:
                self._offer(self._config.predictor, node, depth, 0, probability)
                last *= 1 - self._mask_probability(node, depth, 0)
            elif self._config.grammar:
                self._limited = "grammar"
        if node == 0 and self._lookup_tokens:
            last *= 1 - self._lookup_probability(0)
        if with_mask:
            self._offer_mask(node, depth, last)

    def _offer(self, source: Source, node: int, depth: int, rank: int, reached: float) -> None:
        """Offer the candidate of this rank behind a node that is reached with this probability."""
        if source == "lookup":
            if depth < len(self._lookup_tokens):
                self._push(reached * self._lookup_probability(depth), source, node, depth, rank, reached)
        elif rank < min(self._config.siblings, len(self._of_masks[node].tokens)):
            self._push(reached * self._mask_probability(node, depth, rank), source, node, depth, rank, reached)

    def _offer_mask(self, node: int, depth: int, last: float) -> None:
        """Offer one more mask slot behind a node that is the last accepted one with this probability."""
        index, most = self._masks[node], min(self._config.mask_slots, self._remaining - 2 - depth)
        if index < most:
            opens = self._config.mask_layout.lead and not index
            gain = self._openings[most - 1] if opens else self._outlook.gains[index]
            self._push(last * gain, None, node, depth, 0, last)
        elif index < self._config.mask_slots:
            self._limited = "end_of_text"

    def _push(self, promise: float, source: Source | None, node: int, depth: int, rank: int, reached: float) -> None:
        if source is not None and depth + 1 >= self._remaining:
            self._limited = "end_of_text"
        elif promise <= self._least:
            self._limited = "not_worth_it"
        else:  # among equals, the first comes first
            heappush(self._heap, (-promise, next(self._numbers), source, node, depth, rank, reached))

    def _lookup_probability(self, depth: int) -> float:
        """Probability of a lookup token behind an accepted one."""
        return min(_MOST, self._outlook.lookup[depth]) if depth < len(self._lookup_tokens) else 0.0

    def _mask_probability(self, node: int, depth: int, rank: int) -> float:
        """Probability of a mask slot's candidate behind an accepted node."""
        trust = self._outlook.trust
        factor = trust[min(depth, len(trust) - 1)] if trust else 1.0
        return min(_MOST, self._of_masks[node].probabilities[rank]) * factor
