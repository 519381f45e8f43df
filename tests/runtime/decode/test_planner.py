"""Planning of drafts: they pay where they are accepted, never cost more than their budget, and requests of a call agree."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spaceport.graphs.contract.draft_methods import DraftAcceptance
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import visible_length
from spaceport.runtime import Decoding
from spaceport.runtime.costs import StepCosts
from spaceport.runtime.decode.draft import Candidates, Draft, DraftConfig
from spaceport.runtime.decode.plan import Verdict, plan_thread
from spaceport.runtime.decode.planner import (
    CREDIT,
    SHARE,
    DraftPlanner,
    SharedCall,
    Sharing,
    TreeDrafter,
    Wish,
    drafter_for,
)
from spaceport.runtime.decode.sequence import TokenSequence, root_sequence
from spaceport.runtime.engine import Batch
from support.hash_engine import VOCAB, HashEngine, Language, advance, request_for
from support.hash_runtime import hash_runtime


def wish(*worth: float, left: float = 9.0, rate: float = 1.0, row: float = 0.2) -> Wish:
    """A request whose rows are worth this many tokens, and cost it 0.2 plain steps each."""
    return Wish(worth, tuple(1 + row * more for more in range(24)), rate, left)


@pytest.mark.parametrize(
    ("wishes", "least", "width"),
    [
        ([wish(1.0), wish(1.0)], 1, 1),
        ([wish(1.0, 1.9), wish(1.0, 1.9)], 1, 2),
        ([wish(1.0, 1.3), wish(1.0)], 1, 1),  # 0.3 tokens for 0.2 plain steps of each of both
        ([wish(1.0, 1.5), wish(1.0)], 1, 2),
        ([wish(1.0, 1.3, 2.5), wish(1.0)], 1, 3),  # a row that is not worth it alone
        ([wish(1.0, 1.9, 2.8, left=0.2), wish(1.0, 1.9, left=0.2)], 1, 2),  # no budget for a third row
        ([wish(1.0, 1.9, rate=5.0), wish(1.0, 1.9, rate=5.0)], 1, 1),
        # rows cost one of them twice as much: together they can pay for two rows, in whatever order they are asked
        ([wish(1.0, 1.9, 2.8, left=0.3), wish(1.0, 1.9, 2.8, left=0.4, row=0.4)], 1, 2),
        ([wish(1.0, 1.9, 2.8, left=0.4, row=0.4), wish(1.0, 1.9, 2.8, left=0.3)], 1, 2),
        ([wish(1.0), wish(1.0)], 9, 9),  # a draft that cannot be cut
        # another request has four threads, so all have four rows, which cost the budgets nothing; a fifth is a draft's
        ([wish(1.0, 1.9, 2.8, 3.7, 4.6, left=0.3)], 4, 5),
        ([], 3, 3),
    ],
)
def test_a_call_is_as_wide_as_it_pays_for_all(wishes: list[Wish], least: int, width: int) -> None:
    call = SharedCall(max(2, len(wishes)), wishes)
    call.decide(least)
    assert (call.least, call.width) == (least, width)


def test_a_request_starts_from_the_rates_of_its_bundle_at_the_nearest_temperature() -> None:
    lookup = (0.1, 0.2, 0.3, 0.4, 0.5)
    measured = (DraftAcceptance((0.9, 0.8), lookup), DraftAcceptance((0.4, 0.1), lookup, temperature=1.0))
    planner = DraftPlanner(SHARED_FLAT, measured)
    for temperature, rates, near in ((0.0, [0.9, 0.8], True), (0.3, [0.9, 0.8], False), (0.8, [0.4, 0.1], True)):
        acceptance = planner.acceptance(2, temperature)
        assert acceptance.masks == rates
        # rates of prompt lookup hold near their temperature only
        assert acceptance.lookup[:3] == ([0.1, 0.2, 0.3] if near else [0.3, 0.45, 0.6])


def slow_then_stopped() -> Iterator[float]:
    """Most readings follow each other at once, some after seconds; the process is stopped for an hour, too."""
    draws = random.Random(0)
    return accumulate(3600.0 if reading == 1200 else draws.paretovariate(1.1) / 1000 for reading in count())


def drafted(monkeypatch: pytest.MonkeyPatch, readings: Iterator[float]) -> list[list[int]]:
    """The draft tokens of each step of twenty requests, on a machine with this clock."""
    for module in ("decode.step", "scheduling.scheduler"):
        monkeypatch.setattr(f"spaceport.runtime.{module}.perf_counter", readings.__next__)
    # each row costs a tenth of a step, and Python code counts
    costs = StepCosts(64, ((1, 1e-3), (64, 7.3e-3)))
    with hash_runtime(Language(3), costs=costs) as steady:
        decoding = Decoding(max_tokens=50, ignore_eos=True, fork=False)
        completions = [steady.generate([1, 2, 3, seed % 7], decoding) for seed in range(20)]
    return [completion.statistics.drafted_by_step for completion in completions]


def test_plans_are_the_same_however_long_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drafted(monkeypatch, (reading / 1000 for reading in count()))
    assert sum(map(sum, expected)) > 100
    assert drafted(monkeypatch, slow_then_stopped()) == expected


FLOAT32 = StepCosts(64, ((1, 1.0), (4, 1.12), (9, 1.4), (16, 1.6), (36, 2.5)), relative=True)
INT4 = StepCosts(64, ((1, 1.0), (2, 2.1), (4, 2.3), (9, 3.0), (16, 4.0), (36, 7.0)), relative=True)
FLAT = StepCosts(64, ((1, 1.0), (36, 1.05), (64, 1.1)), relative=True)
JUMPS = StepCosts(64, ((1, 1.0), (8, 1.0), (9, 1.9), (16, 1.9), (17, 2.8), (64, 2.9)), relative=True)
SHORT = StepCosts(64, ((1, 3e-4), (4, 3.3e-4), (64, 2e-3)))  # Python code takes a part of each step
SHARED_INT8 = StepCosts(
    256, ((1, 13.0), (4, 16.0), (16, 25.0), (64, 68.0)), 8, ((1, 27.0), (4, 48.0), (9, 81.0)), relative=True
)
SHARED_FLAT = StepCosts(256, ((1, 1.0), (64, 1.1), (512, 1.5)), 8, ((1, 1.0), (9, 1.1), (24, 1.2)), relative=True)

TOKENS = TokenIds(mask=(999,))
Fate = Callable[[int, int], bool]  # index of the token in the text, depth of the mask slot -> whether it is right
CLAIMED = 0.7  # probability that each mask slot gives to its token
ALONE = Sharing(1, 64)


class Blank(HashEngine):
    """An engine whose logits nobody reads."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.widths.append(batch.input_ids.shape[1])
        return np.zeros((*batch.logit_rows.shape, VOCAB), np.float32)


@dataclass
class Fated:
    """Selects a token by its position, as mask slots predict it if they are right."""

    fate: Fate
    written: Callable[[int], int] = lambda position: 100 + position

    def token(self, logits: NDArray[np.float32], thread: TokenSequence, ahead: Sequence[int]) -> int:
        return self.written(len(thread.tokens) + len(ahead))

    def candidates(
        self, logits: NDArray[np.float32], thread: TokenSequence, position: int, most: int
    ) -> tuple[Candidates, ...]:
        right = [self.fate(position + depth, depth) for depth in range(len(logits))]
        tokens = [self.written(at) if kind else 99 for at, kind in enumerate(right, position)]
        return tuple(Candidates((token,), (CLAIMED,)) for token in tokens)


class Spent(NamedTuple):
    """Tokens of each request, and the time of all steps, in plain steps, with their rows."""

    tokens: float
    time: float
    widths: list[int]


def decode(planner: DraftPlanner, draft_config: DraftConfig, fates: Sequence[Fate], length: int) -> Spent:
    """Decode at least `length` tokens each; drafts are chains, since each mask slot proposes one token."""
    count = len(fates)
    engine = Blank(Language(0), 1 + 2 * visible_length(count * length), count)
    requests = [request_for(engine, [1, 2, 3], 10**6, draft_config, selector=Fated(fate)) for fate in fates]
    for request in requests:
        request.drafter, request.prefilling = TreeDrafter(draft_config, planner), False
        request.reuse(2)
    while (tokens := sum(request.added for request in requests)) < count * length:
        advance(engine, *requests)
    times = [planner.costs.seconds(rows, count, 64) for rows in (1, *engine.widths)]
    return Spent(tokens / count, sum(times[1:]) / times[0], engine.widths)


def coin(accepted: float, seed: int = 0) -> Fate:
    """Mask slots that are right with one probability at each depth, if those before them were."""
    draws = random.Random(seed)
    fate: dict[int, int] = {}  # first index of a group -> how many of it are right

    def right(index: int, depth: int) -> bool:
        if depth == 0:
            fate[index] = 0
            while draws.random() < accepted and fate[index] < 9:
                fate[index] += 1
        return depth < fate[index - depth]

    return right


@st.composite
def fates(draw: st.DrawFn) -> Fate:
    """Acceptance that drifts, comes in bursts, or turns against what was just learned."""
    kind = draw(st.sampled_from(("drift", "bursts", "adverse")))
    seed, accepted, period = draw(st.integers(0, 99)), draw(st.floats(0, 1)), draw(st.integers(5, 80))
    draws = random.Random(seed)
    streak = iter(range(10**9))

    def right(index: int, depth: int) -> bool:
        if kind == "drift":
            return draws.random() < (accepted if index % (4 * period) < 2 * period else 0.05)
        if kind == "bursts":
            return index // period % 2 == 0
        return next(streak) % period < period // 3

    return right


@given(st.sampled_from((FLOAT32, INT4, FLAT, JUMPS, SHORT)), fates(), st.integers(1, 8), st.integers(30, 300))
@settings(max_examples=60)
def test_no_fate_of_drafts_costs_more_than_the_bound(table: StepCosts, fate: Fate, slots: int, length: int) -> None:
    spent = decode(DraftPlanner(table), DraftConfig(slots), [fate], length)
    assert spent.time <= (1 + SHARE) * spent.tokens + CREDIT + 1e-9


@pytest.mark.slow
@given(st.sampled_from((SHARED_INT8, SHARED_FLAT)), st.lists(fates(), min_size=2, max_size=8), st.integers(20, 90))
@settings(max_examples=25)
def test_requests_together_never_lose_more_than_their_budgets(
    table: StepCosts, together: list[Fate], length: int
) -> None:
    spent = decode(DraftPlanner(table), DraftConfig(5, siblings=1), together, length)
    assert spent.time <= (1 + SHARE) * spent.tokens + CREDIT + 1e-6


@pytest.mark.parametrize(
    ("table", "accepted", "requests", "least"),
    [
        *((table, 0.0, 1, 0.97) for table in (FLOAT32, INT4, FLAT, JUMPS)),  # drafts that are never right stop
        (FLOAT32, 0.79, 1, 1.7),
        (INT4, 0.79, 1, 1.0),
        (FLAT, 0.79, 1, 2.9),
        (FLOAT32, 0.46, 1, 1.15),
        (SHARED_FLAT, 0.8, 8, 2.0),
    ],
)
def test_drafts_pay_where_they_are_right(table: StepCosts, accepted: float, requests: int, least: float) -> None:
    together = [coin(accepted, seed) for seed in range(requests)]
    spent = decode(DraftPlanner(table), DraftConfig(5, siblings=1), together, 1000 // requests)
    assert spent.tokens / spent.time >= least


def test_a_request_takes_the_same_steps_whatever_came_before() -> None:
    planner = DraftPlanner(FLOAT32)
    first = decode(planner, DraftConfig(5), [coin(0.5)], 100)
    decode(planner, DraftConfig(5), [coin(0.0)], 200)
    assert decode(planner, DraftConfig(5), [coin(0.5)], 100) == first


@pytest.mark.parametrize("new_tokens", [1, 30, 300])
def test_probable_looked_up_tokens_are_drafted_at_once_where_planning_takes_long(new_tokens: int) -> None:
    """Mask slots are never right, and nothing is spent outside of the engine."""
    costs = StepCosts(64, tuple((rows, 2e-4 * time) for rows, time in FLOAT32.single))
    text = [5, 6, 7, 8, *range(100, 100 + new_tokens)] * 9
    engine, config = Blank(Language(0), 600, 1), DraftConfig(5, lookup=16)
    request = request_for(engine, text[:4], 10**6, config, selector=Fated(lambda *_: False, text.__getitem__))
    request.drafter = TreeDrafter(config, DraftPlanner(costs, (DraftAcceptance((0.0,)),)))
    (thread,) = request.threads
    while request.added < new_tokens + 4:
        advance(engine, request)
    assert thread.tokens == text[: len(thread.tokens)]
    assert thread.drafted[new_tokens + 3]  # the fourth of the tokens that come again
    assert engine.widths[1:new_tokens] == [1] * (new_tokens - 1)


TENTHS = StepCosts(64, ((1, 1.0), (64, 7.3)), relative=True)  # 0.1 plain steps for each row
TWO_THREADS = StepCosts(64, ((1, 0.9), (2, 1.0), (64, 7.2)), relative=True)  # two threads: 0.2 for a row of each
THREE = tuple(Candidates((token,), (0.9,)) for token in (7, 8, 9))


def tree_drafter(table: StepCosts, saved: float, mask_slots: int = 5) -> TreeDrafter:
    """A drafter that has saved this time so far, in the unit of the table, beside its credit."""
    drafter = TreeDrafter(DraftConfig(mask_slots, lookup=0), DraftPlanner(table))
    drafter._time = -saved
    return drafter


@pytest.mark.parametrize(
    ("table", "left", "threads", "tokens", "masks"),
    [
        (TENTHS, 0.0, 1, 0, 0),
        (TENTHS, 0.15, 1, 1, 1),
        (TENTHS, 0.45, 1, 3, 4),
        (TWO_THREADS, 0.3, 2, 0, 0),  # threads share what is left
        (TWO_THREADS, 0.4, 2, 1, 1),
        (TWO_THREADS, 0.8, 2, 2, 2),
    ],
)
def test_drafts_cost_what_is_left(table: StepCosts, left: float, threads: int, tokens: int, masks: int) -> None:
    sharing = Sharing(threads, 64)
    plain = DraftPlanner(table).curve(24, sharing).plain
    drafter, thread = tree_drafter(table, (left - CREDIT) * plain), root_sequence([1, 2, 3], 8)
    draft = drafter.draft(thread, 100, 64, sharing)
    assert (sum(draft.masks), draft.limited) == (masks, "budget")
    thread.candidates = THREE
    assert drafter.draft(thread, 100, 64, sharing).tokens == (7, 8, 9)[:tokens]


@pytest.mark.parametrize(("rates", "slots"), [((0.9, 0.5, 0.1), 2), ((0.9, 0.1, 0.1), 1), ((0.1, 0.1, 0.1), 0)])
def test_each_mask_slot_has_the_value_of_its_own_depth(rates: tuple[float, ...], slots: int) -> None:
    """A row costs a tenth of a plain step, and a mask slot is worth half of what it predicts."""
    planner = DraftPlanner(TENTHS, (DraftAcceptance(rates),))
    drafter, thread = TreeDrafter(DraftConfig(3), planner), root_sequence([1, 2, 3], 8)
    assert drafter.draft(thread, 100, 64, ALONE).masks == (slots,)


@pytest.mark.parametrize(("rate", "tokens"), [(1.0, (7,)), (2.9, (7,)), (3.1, ())])
def test_a_row_has_to_yield_more_than_the_request_generates_otherwise(rate: float, tokens: tuple[int, ...]) -> None:
    """A token that is right three times in ten, for a tenth of a plain step."""
    drafter, thread = tree_drafter(TENTHS, 0.0), root_sequence([1, 2, 3], 8)
    drafter._time, drafter._plain_time = 1e4, rate * 1e4
    thread.candidates = (Candidates((7,), (0.3,)),)
    assert drafter.draft(thread, 2, 64, ALONE).tokens == tokens


def test_what_is_left_is_time_and_not_steps() -> None:
    """Eight threads take as long as one here, so a step that they share saves the last one an eighth of a step."""
    table = StepCosts(64, ((1, 1.0), (8, 1.0), (64, 8.0)), relative=True)
    drafter, planner = tree_drafter(table, 2.0), DraftPlanner(table)
    for threads, steps in ((8, 16.0), (1, 2.0)):
        assert drafter.left(planner.curve(9, Sharing(threads, 64))) == pytest.approx(CREDIT + SHARE + steps)


SLOW = StepCosts(64, ((1, 2e-4), (64, 1e-2)))


@pytest.mark.parametrize(
    ("mask_slots", "table", "left", "limited"),
    [(0, FLOAT32, 0.0, None), (5, SLOW, 0.2, "not_worth_it"), (5, SLOW, -0.2, "budget")],
)
def test_a_request_that_drafts_nothing_counts_when_others_choose_the_width_of_a_call(
    mask_slots: int, table: StepCosts, left: float, limited: str | None
) -> None:
    shared = SharedCall(2)
    sharing = Sharing(1, 64, shared)
    credit = CREDIT if mask_slots else 0.0
    saved = (left - credit) * DraftPlanner(table).curve(24, sharing).plain
    draft = tree_drafter(table, saved, mask_slots).draft(root_sequence([1, 2, 3], 8), 100, 64, sharing)
    assert (draft.rows, draft.limited) == (1, limited)
    (wish,) = shared.wishes
    assert (list(wish.worth), wish.rate, wish.left) == ([1.0], 1.0, pytest.approx(left + SHARE))


def test_a_call_that_is_wide_for_other_reasons_is_not_charged() -> None:
    shared = SharedCall(2)
    drafter, thread = tree_drafter(FLOAT32, -9.0), root_sequence([1, 2, 3], 8)  # so it drafts nothing itself
    thread.fed = 2
    sharing = Sharing(1, 64, shared)
    curve = DraftPlanner(FLOAT32).curve(24, sharing)
    left = drafter.left(curve)
    drafter.draft(thread, 100, 64, sharing)
    shared.decide(least=9)
    drafter.learn(plan_thread(thread, Draft(), TOKENS, 512), Verdict((0,), (4,), ()))
    assert drafter.left(curve) == pytest.approx(left + SHARE)


def test_a_chain_ends_before_a_mask_slot_without_a_probable_token() -> None:
    drafter = drafter_for(DraftConfig(mask_slots=3, shape="chain"), DraftPlanner(FLOAT32))
    thread = root_sequence([1, 2], 64)
    known, nothing = Candidates((7,), (0.9,)), Candidates((), ())
    for where, expected in ((3, (7, 7, 7)), (1, (7,)), (0, ())):
        thread.candidates = tuple(nothing if index == where else known for index in range(3))
        assert drafter.draft(thread, 50, 64, Sharing()).tokens == expected
