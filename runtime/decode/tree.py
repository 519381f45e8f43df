"""The draft tree with the highest expected gain for the time of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, count
from operator import itemgetter

from spaceport.runtime.costs import Curve
from spaceport.runtime.decode.draft import Candidates, Draft, DraftConfig, Reason, Source

_Choice = tuple[float, int, Source]  # probability behind an accepted node, token, source
_MOST = 0.97  # maximum probability of a prediction, so that alternatives are still considered


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
        self._sources: list[Source] = []
        self._probabilities: list[float] = []
        self._order: list[int] = []  # by row: the node of a mask row, or -1 for a candidate
        self._masks: list[int] = []  # by node, as the next four
        self._depths: list[int] = []
        self._reached: list[float] = []  # probability that it is accepted
        self._choices: list[list[_Choice]] = []  # candidates behind it, the most probable first
        self._last: list[float] = []  # probability that it is the last accepted one
        self._openings = opening_gains(outlook.gains, config.mask_layout.lead)
        self._heap: list[
            tuple[float, int, int, int]
        ] = []  # value, number, node, rank of a candidate or -1: a mask slot
        self._numbers = count()
        self._least = outlook.rate * outlook.curve.least  # minimum value of a row in any step
        self._limited: Reason = "no_candidates"

    def grown(self, rows: int) -> Draft:
        """The tree with the best number of rows, at most `rows`."""
        outlook, worth, used = self._outlook, [1.0], 1
        times, slopes, rate = outlook.curve.times, outlook.curve.slopes, outlook.rate
        best_count, best, rows = 1, 1.0 - rate * times[0], min(rows, len(times))
        self._add_node(0, 1.0, outlook.last, by_mask=True, by_lookup=True)
        while used < rows and self._heap:
            negative, _, node, rank = heappop(self._heap)
            if -negative < rate * slopes[used - 1]:
                self._limited = "not_worth_it"
                break
            values = self._add_mask(node, rows - used) if rank < 0 else self._add_candidate(node, rank, -negative)
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
            self._limited if used < rows else "row_limit" if rows < self._config.rows else None,
        )
        return draft.cut(best_count, "not_worth_it")

    def _add_node(self, depth: int, reached: float, token: int, *, by_mask: bool, by_lookup: bool) -> None:
        """Add a node that is reached with this probability, and offer the rows behind it."""
        choices, last = self._choices_behind(depth, token, by_mask, by_lookup)
        self._masks.append(0)
        self._depths.append(depth)
        self._reached.append(reached)
        self._choices.append(choices)
        self._last.append(reached * last)
        self._offer(len(self._masks) - 1, 0)
        self._offer_mask(len(self._masks) - 1)

    def _choices_behind(self, depth: int, token: int, by_mask: bool, by_lookup: bool) -> tuple[list[_Choice], float]:
        """The candidates of all sources behind a node, and the probability that none of the best ones is accepted."""
        choices: list[_Choice] = []
        last, outlook = 1.0, self._outlook
        if by_mask and depth < len(self._candidates):
            behind = self._candidates[depth].behind(token)
            trust = outlook.trust[min(depth, len(outlook.trust) - 1)] if outlook.trust else 1.0
            ranked = zip(behind.probabilities, behind.tokens[: self._config.siblings], strict=False)
            choices = [
                (min(_MOST, probability) * trust, token, self._config.predictor) for probability, token in ranked
            ]
            last = 1 - choices[0][0] if choices else 1.0
            if not choices and self._config.grammar:
                self._limited = "grammar"
        if by_lookup and depth < len(self._lookup_tokens):
            token, probability = self._lookup_tokens[depth], min(_MOST, outlook.lookup[depth])
            last *= 1 - probability
            same = [index for index, choice in enumerate(choices) if choice[1] == token]
            source: Source = "both" if same else "lookup"
            for index in same:
                probability = max(probability, choices.pop(index)[0])
            choices.append((probability, token, source))
            choices.sort(key=itemgetter(0), reverse=True)
        return choices[: self._config.siblings], last

    def _add_candidate(self, parent: int, rank: int, reached: float) -> tuple[float, ...]:
        """Add a candidate behind a node; returns its value."""
        _, token, source = self._choices[parent][rank]
        self._order.append(-1)
        self._tokens.append(token)
        self._parents.append(parent)
        self._sources.append(source)
        self._probabilities.append(reached)
        self._offer(parent, rank + 1)
        by_lookup = source in ("lookup", "both")
        self._add_node(self._depths[parent] + 1, reached, token, by_mask=source != "lookup", by_lookup=by_lookup)
        return (reached,)

    def _add_mask(self, node: int, rows: int) -> tuple[float, ...]:
        """Add a mask slot behind a node if there are enough rows; returns the value of each row that it needs."""
        index = self._masks[node]
        needed = 1 if index else 1 + self._config.mask_layout.lead
        if needed > rows:
            self._limited = "row_limit"
            return ()
        self._order.extend([node] * needed)
        self._masks[node] += 1
        self._offer_mask(node)
        return (*(0.0,) * (needed - 1), self._last[node] * self._outlook.gains[index])

    def _offer(self, node: int, rank: int) -> None:
        """Offer the candidate of this rank behind a node."""
        if rank < len(self._choices[node]):
            if self._depths[node] + 1 < self._remaining:
                self._push(self._reached[node] * self._choices[node][rank][0], node, rank)
            else:
                self._limited = "end_of_text"

    def _offer_mask(self, node: int) -> None:
        """Offer one more mask slot behind a node."""
        index, most = self._masks[node], min(self._config.mask_slots, self._remaining - 2 - self._depths[node])
        if index < most:
            opens = self._config.mask_layout.lead and not index
            self._push(self._last[node] * (self._openings[most - 1] if opens else self._outlook.gains[index]), node, -1)
        elif index < self._config.mask_slots:
            self._limited = "end_of_text"

    def _push(self, value: float, node: int, rank: int) -> None:
        if value > self._least:  # among equals, the first comes first
            heappush(self._heap, (-value, next(self._numbers), node, rank))
        else:
            self._limited = "not_worth_it"
