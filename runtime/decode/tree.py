"""Tree: the draft with the highest expected gain for the time of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from spaceport.runtime.decode.draft import Candidates, Draft, DraftConfig, Source
from spaceport.runtime.decode.long_run import opening_gains

_MOST = 0.97  # maximum probability of a prediction, so that alternatives are still considered


@dataclass(frozen=True)
class Curve:
    """The time of a step by its number of rows, in plain steps."""

    times: Sequence[float]  # of 1, 2, ... rows; the first is 1
    plain: float = 1.0  # seconds of a plain step

    @cached_property
    def slopes(self) -> list[float]:
        """By number of rows: the lowest average time per further row of any wider step."""
        found: list[float] = []
        for rows, time in enumerate(self.times, 1):
            wider = self.times[rows:]
            found.append(min(((each - time) / more for more, each in enumerate(wider, 1)), default=float("inf")))
        return found


@dataclass(frozen=True)
class Outlook:
    """Inputs of a plan: cost of rows, acceptance probabilities, and value of draft tokens."""

    curve: Curve
    rate: float  # tokens per plain step that are generated otherwise
    gains: Sequence[float]  # tokens: value of the first, the second, ... draft token in the next step
    trust: Sequence[
        float
    ] = ()  # by depth: factor for the probabilities of mask slots; the last one applies to all deeper ones
    lookup: Sequence[float] = ()  # by depth: probability of a lookup token behind an accepted one
    last: int = 0  # the last known token, before the draft


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
    growth = _Growth(candidates, lookup_tokens, draft_config, remaining, outlook)
    best = growth.grow(min(rows, len(outlook.curve.times)))
    return growth.draft().cut(best)


class _Growth:
    """A tree that grows row by row; the heap holds the possible next rows: candidates and mask slots."""

    def __init__(
        self,
        candidates: Sequence[Candidates],
        lookup_tokens: Sequence[int],
        draft_config: DraftConfig,
        remaining: int,
        outlook: Outlook,
    ) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._masks: list[int] = [0]
        self._sources: list[Source] = []
        self._probabilities: list[float] = []
        self._order: list[int] = []  # by row: the node of a mask row, or -1 for a candidate
        self._worth = [1.0]
        self._candidates, self._lookup_tokens, self._outlook = candidates, lookup_tokens, outlook
        self._mask_slots, self._siblings, self._remaining = draft_config.mask_slots, draft_config.siblings, remaining
        self._mask_layout = draft_config.mask_layout
        self._openings = opening_gains(outlook.gains, self._mask_layout.lead)
        self._predictor = draft_config.predictor
        self._nodes: dict[tuple[int, int], int] = {}  # parent and token -> node
        self._of_masks: dict[int, Candidates] = {}  # candidates of mask slots behind each node
        self._followers = [0]  # candidates behind each node
        self._heap: list[tuple[float, int, Source | None, int, int, int, float]] = []
        self._offered = 0
        self._least = outlook.rate * min(outlook.curve.slopes)  # minimum value of a row in any step

    def grow(self, rows: int) -> int:
        """Add rows while further ones may pay; returns the best number of rows."""
        times, slopes, rate = self._outlook.curve.times, self._outlook.curve.slopes, self._outlook.rate
        count, worth = 1, 1.0
        best_count, best = 1, worth - rate * times[0]
        self._behind(0, 0, 1.0, with_mask=True)
        self._offer("lookup", 0, 0, 0, 1.0)
        while count < rows and self._heap:
            promise, _, source, node, depth, rank, probability = heappop(self._heap)
            if -promise < rate * slopes[count - 1]:
                break
            if source is None and count + self._rows_of_slot(node) > rows:
                continue
            for value in self._take(source, node, depth, rank, probability, -promise):
                count += 1
                worth += value
                self._worth.append(worth)
                if worth - rate * times[count - 1] > best:
                    best_count, best = count, worth - rate * times[count - 1]
        return best_count

    def draft(self) -> Draft:
        return Draft(
            tuple(self._tokens),
            tuple(self._parents),
            tuple(self._masks),
            tuple(self._sources),
            tuple(self._probabilities),
            tuple(self._worth),
            tuple(self._order),
            self._mask_layout,
        )

    def _take(
        self, source: Source | None, node: int, depth: int, rank: int, probability: float, promise: float
    ) -> tuple[float, ...]:
        """Add what was offered; returns the value of each row that it needs."""
        if source is None:
            rows = self._rows_of_slot(node)
            value = probability * self._outlook.gains[self._masks[node]]
            self._order.extend([node] * rows)
            self._masks[node] += 1
            self._offer_mask(node, depth, probability)
            return (*(0.0,) * (rows - 1), value)
        if source != "lookup":
            self._offer(source, node, depth, rank + 1, probability)
        return (promise,) if self._add(source, node, depth, rank, promise) else ()

    def _rows_of_slot(self, node: int) -> int:
        """Rows of one more mask slot behind a node."""
        return 1 if self._masks[node] else 1 + self._mask_layout.lead

    def _add(self, source: Source, parent: int, depth: int, rank: int, probability: float) -> bool:
        """Add a candidate behind a node, unless the other source has proposed it or the node has enough siblings."""
        token = self._lookup_tokens[depth] if source == "lookup" else self._of_masks[parent].tokens[rank]
        node = self._nodes.get((parent, token))
        fresh = node is None
        if node is None:
            if self._followers[parent] == self._siblings:
                return False
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
        return fresh

    def _behind(self, node: int, depth: int, probability: float, with_mask: bool) -> None:
        """Offer the possible rows behind a node that is reached with this probability."""
        last = probability
        if depth < len(self._candidates):
            before = self._tokens[node - 1] if node else self._outlook.last
            found = self._of_masks[node] = self._candidates[depth].behind(before)
            if found.tokens:
                self._offer(self._predictor, node, depth, 0, probability)
                last *= 1 - self._mask_probability(node, depth, 0)
        if node == 0 and self._lookup_tokens:
            last *= 1 - self._lookup_probability(0)
        if with_mask:
            self._offer_mask(node, depth, last)

    def _offer(self, source: Source, node: int, depth: int, rank: int, probability: float) -> None:
        """Offer the candidate of this rank behind a node that is reached with this probability."""
        if depth + 1 >= self._remaining:
            return
        if source == "lookup":
            if depth < len(self._lookup_tokens):
                self._push(probability * self._lookup_probability(depth), source, node, depth, rank, probability)
        elif rank < min(self._siblings, len(self._of_masks[node].tokens)):
            self._push(probability * self._mask_probability(node, depth, rank), source, node, depth, rank, probability)

    def _lookup_probability(self, depth: int) -> float:
        """Probability of a lookup token behind an accepted one."""
        return min(_MOST, self._outlook.lookup[depth]) if depth < len(self._lookup_tokens) else 0.0

    def _mask_probability(self, node: int, depth: int, rank: int) -> float:
        """Probability of a mask slot's candidate behind an accepted node."""
        trust = self._outlook.trust
        return min(_MOST, self._of_masks[node].probabilities[rank]) * (
            trust[min(depth, len(trust) - 1)] if trust else 1.0
        )

    def _offer_mask(self, node: int, depth: int, probability: float) -> None:
        """Offer one more mask slot behind a node that is the last accepted one with this probability."""
        index, most = self._masks[node], min(self._mask_slots, self._remaining - 2 - depth)
        if index < most:
            opens = self._mask_layout.lead and not index
            gain = self._openings[most - 1] if opens else self._outlook.gains[index]
            self._push(probability * gain, None, node, depth, 0, probability)

    def _push(
        self, promise: float, source: Source | None, node: int, depth: int, rank: int, probability: float
    ) -> None:
        if promise > self._least:
            self._offered += 1  # among equals, the first comes first
            heappush(self._heap, (-promise, self._offered, source, node, depth, rank, probability))
