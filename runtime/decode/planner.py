"""Planning of drafts: what rows cost and yield in the long run, and the draft of each thread of a request.

The mask slots of a step provide the draft tokens of the next one. The value of a step is therefore the tokens that it
generates plus the value of the draft tokens that it leaves. Value iteration on a small model computes it: the state is
the number of available draft tokens, in a chain; the action is the best draft tree for them; the reward is the expected
number of tokens less what the same time yields otherwise.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise, product, repeat, starmap
from operator import mul, sub
from typing import NamedTuple, Protocol

from spaceport.graphs.contract.draft_methods import CAUSAL, PREDICTORS, DraftAcceptance, MaskLayout
from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.costs import VISIBLE, Curve, StepCosts
from spaceport.runtime.decode.draft import (
    MOST_LIKELY,
    Draft,
    DraftConfig,
    Outlook,
    Ranked,
    Reason,
    chain,
    tree,
)
from spaceport.runtime.decode.plan import Part, Verdict
from spaceport.runtime.decode.sequence import TokenSequence
from spaceport.runtime.decode.sources import Acceptance, LearningProposal, sources_for

SHARE = 0.01  # of the time of plain decoding that drafts may cost
CREDIT = 1.6  # plain steps that drafts may cost at the start of a request
_LONG = 1 << 30  # tokens that a text may still get
_ROUNDS = 30  # of value iteration; about four are enough to converge
_CLOSE = 1e-3  # relative change of the rate that counts as none
_GRID = 10  # acceptance rates are rounded to 1 / 10 for value iteration
_MOST_KNOWN = 4096  # curves or solutions
_NEAR = 0.25  # difference in temperature up to which measured rates of prompt lookup hold
_PACE = 0.1  # weight of a step in the average of tokens and time
_PUBLISH_EVERY, _PUBLISHED = 8, 0.2  # steps between updates of the rates that requests share, and their weight
NO_SOURCES, NO_CANDIDATES, NO_BUDGET = Draft(), Draft(limited="no_candidates"), Draft(limited="budget")
NOT_WORTH_IT = Draft(limited="not_worth_it")


class LongRun(NamedTuple):
    """The best token rate, and the value of available draft tokens at that rate."""

    rate: float  # tokens per plain step
    gains: tuple[float, ...]  # tokens; value of the first, the second, ... available draft token


class ChainProposal:
    """A proposal of one token at each depth, with its probability behind an accepted one."""

    source, anywhere = "", False

    def __init__(self, chances: Sequence[float]) -> None:
        self._chances, self.depths = chances, len(chances)

    def behind(self, depth: int, path: Sequence[int]) -> Ranked:
        return ((self._chances[depth], 0),)


def solve(
    curve: Curve, reach: Sequence[float], mask_layout: MaskLayout = CAUSAL, start: LongRun | None = None
) -> LongRun:
    """The long run for `reach`, the probability that the first, the first two, ... draft tokens are all accepted.

    It takes fewer rounds from the solution for similar probabilities.
    """
    run = start or LongRun(1.0, (0.0,) * len(reach))
    chances = chances_of(reach)
    for _ in range(_ROUNDS):
        values, initial_time = [], 0.0  # by number of available draft tokens; time of the step without any
        for at_hand in range(len(reach) + 1):
            rows, tokens = best_rows(curve, chances[:at_hand], run, mask_layout)
            time = curve.times[rows - 1]
            values.append(tokens - run.rate * time)
            initial_time = initial_time or time
        worth = list(accumulate(values, max))  # verifying fewer than available is allowed
        rate = max(run.rate + worth[0] / initial_time, 1.0)
        gains = _concave([0.0, *accumulate([min(later - value, 1.0) for value, later in pairwise(worth)])])
        changed = max(map(abs, map(sub, gains, run.gains)), default=0.0)
        settled = abs(rate - run.rate) <= _CLOSE * rate and changed <= 10 * _CLOSE
        # half way: gains and rate depend on each other, and whole steps may swing for ever
        run = LongRun(rate, tuple([(now + before) / 2 for now, before in zip(gains, run.gains, strict=True)]))
        if settled:
            break
    return run


def chances_of(reach: Sequence[float]) -> list[float]:
    """The probability of each draft token behind an accepted one."""
    return [min(MOST_LIKELY, now / max(before, 1e-9)) for before, now in pairwise((1.0, *reach))]


def best_rows(curve: Curve, chances: Sequence[float], run: LongRun, mask_layout: MaskLayout) -> tuple[int, float]:
    """The rows and the expected tokens of the best draft for a chain of available draft tokens."""
    times, slopes, gains = curve.times, curve.slopes, run.gains
    if not mask_layout.shift:
        config = DraftConfig(len(gains), rows=len(times), siblings=1, mask_layout=mask_layout)
        worth = tree((ChainProposal(chances),), config, _LONG, len(times), Outlook(curve, *run)).worth
        return len(worth), worth[-1]
    # The same without growing a tree: no row is worth more than the rows that it needs before it, and the gains fall.
    reached = list(accumulate(chances, mul, initial=1.0))
    last = [
        *map(mul, reached, map(sub, repeat(1.0), chances)),
        reached[-1],
    ]  # by node: that it is the last accepted one
    values = sorted([*reached[1:], *starmap(mul, product(last, gains))], reverse=True)
    tokens, best_rows, best_tokens, best = 1.0, 1, 1.0, 1.0 - run.rate * times[0]
    for rows, value in enumerate(values[: len(times) - 1], 2):
        if value <= run.rate * curve.least or value < run.rate * slopes[rows - 2]:
            break
        tokens += value
        if tokens - run.rate * times[rows - 1] > best:
            best_rows, best_tokens, best = rows, tokens, tokens - run.rate * times[rows - 1]
    return best_rows, best_tokens


def best_rate(curve: Curve, reach: Sequence[float]) -> float:
    """Tokens per plain step with the best number of verified draft tokens, if every step leaves all of them."""
    tokens = accumulate(reach, initial=1.0)
    return max(count / time for count, time in zip(tokens, curve.times, strict=False))


def _concave(worth: Sequence[float]) -> list[float]:
    """The slopes of the lowest concave curve above a rising one.

    Where a few rows cost nearly as much as many, one draft token has no value and several have a high one; each then gets
    its share of it.
    """
    steps: list[float] = []
    while len(steps) < len(worth) - 1:
        start = len(steps)
        slope, count = float("-inf"), 0
        for end in range(start + 1, len(worth)):
            mean = (worth[end] - worth[start]) / (end - start)
            if mean >= slope:
                slope, count = mean, end - start
        steps += [slope] * count
    return steps


class Wish(NamedTuple):
    """The value that a request gets from the rows of a call that it shares with others."""

    worth: Sequence[float]  # expected tokens of 1, 2, ... rows
    times: Sequence[float]  # its share of the call if all requests have 1, 2, ... rows, in plain steps
    rate: float  # tokens per plain step that it generates otherwise
    left: float  # remaining budget in plain steps


@dataclass
class SharedCall:
    """The requests that share an engine call; all are padded to the rows of the widest."""

    requests: int
    wishes: list[Wish] = field(default_factory=list)
    least: int = 1  # rows of the widest request whose draft cannot be cut
    width: int = 1  # rows of the widest request, once decided

    def decide(self, least: int = 1) -> None:
        """Set the width with the highest value for all requests together that their budgets can pay for."""
        self.least = self.width = least
        if not self.wishes:
            return
        widths = range(least, max([len(wish.worth) for wish in self.wishes]) + 1)
        values, extra = [0.0] * len(widths), [0.0] * len(widths)  # tokens less what their time yields otherwise; time
        for worth, times, rate, _ in self.wishes:
            least_time = times[min(least, len(times)) - 1]
            for index, rows in enumerate(widths):
                time = times[min(rows, len(times)) - 1]
                extra[index] += time - least_time
                values[index] += worth[min(rows, len(worth)) - 1] - rate * time
        best, budget = float("-inf"), max(0.0, sum([wish.left + SHARE for wish in self.wishes]))
        for rows, value, time in zip(widths, values, extra, strict=True):
            if time > budget:
                break
            if value > best:
                best, self.width = value, rows


class Sharing(NamedTuple):
    """What a thread shares a step with: threads of its request, other requests, visible slots."""

    threads: int = 1  # live threads of the request
    visible: int = 1  # KV slots
    call: SharedCall | None = None  # None: no other request takes part

    @property
    def requests(self) -> int:
        return 1 if self.call is None else self.call.requests

    @property
    def fills_up(self) -> bool:
        """Whether this thread's rows are padded to those of other requests."""
        return self.call is not None and self.call.requests > 1 and self.threads == 1


class DraftPlanner:
    """Step costs, acceptance rates and long-run values that requests share; used by one OS thread at a time."""

    def __init__(self, costs: StepCosts, measured: Sequence[DraftAcceptance] = (), *, repeatable: bool = False) -> None:
        self.costs = costs
        self._measured = measured  # acceptance rates that the bundle brings, by temperature
        self._repeatable = repeatable  # requests share nothing, so each takes the same steps every time
        self._acceptance: dict[Hashable, Acceptance] = {}
        self._curves: dict[tuple[int, int, int, int], Curve] = {}
        self._solutions: dict[Hashable, LongRun] = {}
        self._last: dict[Hashable, LongRun] = {}  # solutions from which similar ones are found

    def curve(self, most: int, sharing: Sharing) -> Curve:
        """A thread's share of a step if all threads have 1 to `most` rows."""
        key = (most, sharing.threads, sharing.requests, sharing.visible // VISIBLE)
        curve = self._curves.get(key)
        if curve is None:
            if len(self._curves) == _MOST_KNOWN:
                for known in (self._curves, self._solutions, self._last):
                    known.clear()
            curve = self._curves[key] = self.costs.curve(most, sharing.threads, sharing.requests, sharing.visible)
        return curve

    def acceptance(self, kind: Hashable, depths: int, temperature: float = 0.0) -> Acceptance:
        """Acceptance rates that all requests of a kind have learned."""
        nearest = min(self._measured, key=lambda entry: abs(entry.temperature - temperature), default=None)
        if nearest is not None and abs(nearest.temperature - temperature) > _NEAR:
            nearest = replace(nearest, lookup=())  # sampled text departs from the prompt more often
        if self._repeatable:
            return Acceptance(depths, nearest)
        return self._acceptance.setdefault((kind, depths), Acceptance(depths, nearest))

    def long_run(self, curve: Curve, reach: Sequence[float], draft_config: DraftConfig) -> LongRun:
        """The long-run values for acceptance probabilities, which are rounded so that few have to be solved."""
        coarse = tuple([round(_GRID * rate) for rate in reach[: draft_config.mask_slots]])
        shape = (curve, draft_config.mask_slots, draft_config.mask_layout.shift)
        key = (*shape, coarse)
        solution = self._solutions.get(key)
        if solution is None:
            if len(self._solutions) == _MOST_KNOWN:
                self._solutions.clear()
            start = None if self._repeatable else self._last.get(shape)
            solution = solve(curve, [rate / _GRID for rate in coarse], draft_config.mask_layout, start)
            self._solutions[key] = self._last[shape] = solution
        return solution


@dataclass
class _Planned:
    """The inputs of a planned draft."""

    curve: Curve
    sharing: Sharing
    rate: float  # tokens per plain step that are generated otherwise
    proposals: Sequence[LearningProposal] = ()  # empty: the budget allowed no draft
    copying: bool = False  # whether the text is being copied
    grown: bool = False  # whether a tree was grown, which takes time

    def time(self, rows: int) -> float:
        """Time of a step with this many rows of the thread, its share of the call, in plain steps."""
        times, call, least = self.curve.times, self.sharing.call, 1
        if call is not None and self.sharing.fills_up:  # rows that no draft could avoid are not the drafts' cost
            rows, least = max(rows, call.width), call.least
        if rows == least:
            return 1.0 + self.curve.planning * self.grown
        return 1.0 + times[min(len(times), rows) - 1] - times[min(len(times), least) - 1]


class Drafter(Protocol):
    """Proposes the draft of each thread of a request, and learns from what was accepted."""

    drafts: bool  # False: all its drafts are empty, and only requests that share a call with it need to ask for them

    def draft(self, thread: TokenSequence, remaining: int, rows: int, sharing: Sharing) -> Draft:
        """A draft for a thread that may generate `remaining` more tokens; at most `rows` rows, its last token included.

        Also called while a prompt is fed in chunks; such a draft is not used unless the chunk is the last one.
        """

    def learn(self, part: Part, verdict: Verdict) -> None:
        """Learn which draft tokens of a step were accepted.

        `part.draft` is the draft that was fed; `part.thread` still has the candidates of the previous step, from which the
        draft was made.
        """


class ChainDrafter:
    """SPACE's draft: one chain of candidates, and the same number of mask slots behind each; heads need none."""

    drafts = True

    def __init__(self, draft_config: DraftConfig) -> None:
        self._config, self._sources = draft_config, sources_for(draft_config)
        self._depths = draft_config.mask_slots or draft_config.heads
        self._acceptance = Acceptance(self._depths)

    def draft(self, thread: TokenSequence, remaining: int, rows: int, sharing: Sharing) -> Draft:
        slots, layout = self._config.mask_slots, self._config.mask_layout
        rows = min(rows, (slots + 1) * (1 + layout.rows(slots)) + self._config.heads)
        for source in self._sources:
            proposal = source.propose(thread, self._acceptance)
            if tokens := proposal.best()[: self._depths]:
                return chain(tokens, slots, remaining, rows, layout, proposal.source)
        return chain((), slots, remaining, rows, layout)

    def learn(self, part: Part, verdict: Verdict) -> None:
        """A chain always has the same shape."""


class TreeDrafter:
    """The draft tree of all sources that is expected to generate the most tokens per time.

    Drafts may cost a request what they have saved it, plus `SHARE` of the time of plain decoding, plus `CREDIT`. Growing a
    tree counts as well: where it takes long compared with a plain step, trees that turn out empty become rare.
    """

    def __init__(
        self, draft_config: DraftConfig, planner: DraftPlanner, kind: Hashable = None, temperature: float = 0.0
    ) -> None:
        self._config = replace(draft_config, rows=min(draft_config.rows, STEP_ROWS))
        self._planner, self._kind, self._temperature = planner, kind, temperature
        self._sources = sources_for(draft_config) if draft_config.rows > 1 else []
        self.drafts = bool(self._sources)
        # plain steps that drafts may still cost; below 0 if drafts of other requests in its calls have cost more
        self.left = CREDIT if self._sources else 0.0
        self._plain = 0.0  # time of a plain step in which `left` is counted; 0: unknown
        self._tokens = self._time = 1.0  # of a step: moving averages
        self._planned: dict[tuple[int, ...], _Planned] = {}  # by thread

    @cached_property
    def _shared(self) -> Acceptance:
        return self._planner.acceptance(self._kind, self._config.mask_slots or self._config.heads, self._temperature)

    @cached_property
    def _acceptance(self) -> Acceptance:
        """Made with the first draft, by the OS thread that runs steps: requests of the same history start alike."""
        return self._shared.copy()

    def draft(self, thread: TokenSequence, remaining: int, rows: int, sharing: Sharing) -> Draft:
        curve = self._planner.curve(self._config.rows, sharing)
        if curve.plain != self._plain:  # other threads or requests share its steps, or it has a longer context
            self.left *= (self._plain or curve.plain) / curve.plain
            self._plain = curve.plain
        planned = self._planned[thread.path] = _Planned(curve, sharing, max(1.0, self._tokens / self._time))
        fills_up = sharing.fills_up
        if fills_up:  # the requests of the call decide together what they can pay for
            affordable = self._config.rows if self.left + SHARE >= curve.planning else 1
        else:
            # Threads share what is left. Mask slots cost a second time when their tokens are verified, so without
            # candidates half of it is reserved.
            left = self.left / sharing.threads / (1 if thread.candidates else 2)
            affordable = bisect_right(curve.times, 1 + SHARE + left)
        if affordable > 1 and self._sources:
            draft = self._planned_draft(thread, remaining, min(rows, affordable), affordable < rows, planned)
        else:
            draft = NO_BUDGET if self._sources else NO_SOURCES
        if sharing.call is not None and fills_up:
            sharing.call.wishes.append(Wish(draft.worth or (1.0,), curve.times, planned.rate, self.left))
        return draft

    def learn(self, part: Part, verdict: Verdict) -> None:
        thread, written = part.thread, verdict.tokens
        planned = self._planned.pop(thread.path, None)
        if planned is None or not written:
            return
        time = planned.time(part.draft.rows)
        self.left += len(written) * (1 + SHARE) - time
        self._tokens += _PACE * (len(written) - self._tokens)
        self._time += _PACE * (time - self._time)
        if not planned.proposals:  # nothing is known about what would have been drafted
            return
        acceptance = self._acceptance
        weight, predicted, others = acceptance.count_step(), 0, 0
        for proposal in planned.proposals:
            right = proposal.learn(written, weight)
            if proposal.source in PREDICTORS:
                predicted = right
            else:
                others = max(others, right)
        acceptance.learn_masks(predicted - others, len(thread.candidates), len(written), planned.copying, weight)
        if acceptance.steps % _PUBLISH_EVERY == 0:
            self._shared.follow(acceptance, _PUBLISHED)

    def _planned_draft(
        self, thread: TokenSequence, remaining: int, rows: int, out_of_budget: bool, planned: _Planned
    ) -> Draft:
        """The draft with the highest expected gain."""
        config, acceptance, curve, last = self._config, self._acceptance, planned.curve, thread.tokens[-1]
        planned.proposals = [source.propose(thread, acceptance) for source in self._sources]
        proposals, value = [], 0.0
        for proposal in planned.proposals:
            planned.copying = planned.copying or proposal.copying
            if proposal.depths:
                proposals.append(proposal)
                ranked = proposal.behind(0, (last,))
                value = max(value, ranked[0][0]) if ranked else value
        if not proposals and not config.mask_slots:
            return NO_CANDIDATES
        reach = acceptance.reach(planned.copying)
        run = self._planner.long_run(curve, reach, config)
        planned.rate = max(run.rate, best_rate(curve, reach) if config.heads else 0.0, planned.rate)
        if max((value, *run.gains[:1])) <= planned.rate * curve.least:
            return NOT_WORTH_IT
        planned.grown = True
        outlook = Outlook(curve, planned.rate, run.gains, last)
        bound: Reason = "budget" if out_of_budget else "row_limit"
        return tree(proposals, config, remaining, min(rows, config.rows), outlook, bound)


def drafter_for(
    draft_config: DraftConfig, planner: DraftPlanner, kind: Hashable = None, temperature: float = 0.0
) -> Drafter:
    """The drafter of one request; requests of one kind share what they learn."""
    if draft_config.shape == "chain" and (draft_config.mask_slots or draft_config.heads):
        return ChainDrafter(draft_config)
    return TreeDrafter(draft_config, planner, kind, temperature)
