"""Planner: requests that share a call agree on its width, and share what they learn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import accumulate, count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.draft_acceptance import DraftAcceptance
from spaceport.graphs.contract.mask_layout import MaskLayout
from spaceport.runtime import Decoding, Runtime
from spaceport.runtime.costs import StepCosts
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.planner import CREDIT, SHARE, DraftPlanner, SharedCall, Sharing, Wish
from support.acceptance_process import Fate, decode_together
from support.hash_engine import Language
from support.hash_runtime import hash_runtime

INT8 = StepCosts(
    256, ((1, 13.0), (4, 16.0), (16, 25.0), (64, 68.0)), 8, ((1, 27.0), (4, 48.0), (9, 81.0)), relative=True
)
FLAT = StepCosts(256, ((1, 1.0), (64, 1.1), (512, 1.5)), 8, ((1, 1.0), (9, 1.1), (24, 1.2)), relative=True)
LINEAR = tuple(1 + 0.2 * more for more in range(24))


def wish(*worth: float, left: float = 9.0, rate: float = 1.0) -> Wish:
    """A request whose rows are worth this many tokens, and cost it 0.2 plain steps each."""
    return Wish(worth, LINEAR, rate, left)


@pytest.mark.parametrize(
    ("wishes", "width"),
    [
        ((wish(1.0), wish(1.0)), 1),
        ((wish(1.0, 1.9), wish(1.0, 1.9)), 2),
        ((wish(1.0, 1.3), wish(1.0)), 1),  # 0.3 tokens for 0.2 plain steps of each of both
        ((wish(1.0, 1.5), wish(1.0)), 2),
        ((wish(1.0, 1.3, 2.5), wish(1.0)), 3),  # a row that is not worth it alone
        ((wish(1.0, 1.9, 2.8, left=0.2), wish(1.0, 1.9, left=0.2)), 2),  # no budget for a third row
        ((wish(1.0, 1.9, rate=5.0), wish(1.0, 1.9, rate=5.0)), 1),
    ],
)
def test_a_call_is_as_wide_as_it_pays_for_all(wishes: tuple[Wish, ...], width: int) -> None:
    call = SharedCall(len(wishes), list(wishes))
    call.decide()
    assert call.width == width


def test_a_draft_that_cannot_be_cut_makes_the_call_as_wide_as_it_is() -> None:
    call = SharedCall(3, [wish(1.0), wish(1.0)])
    call.decide(least=9)
    assert call.width == 9


def test_threads_of_one_request_stand_side_by_side() -> None:
    assert Sharing(1, 64, SharedCall(4)).fills_up
    assert not Sharing(2, 64, SharedCall(4)).fills_up


@pytest.mark.parametrize("turn", [1, -1])
def test_each_request_pays_by_its_own_context(turn: int) -> None:
    """Rows cost the second one twice as much: together they can pay for two rows, in whatever order they are asked."""
    cheap = Wish((1.0, 1.9, 2.8), (1.0, 1.2, 1.4), 1.0, 0.3)
    dear = Wish((1.0, 1.9, 2.8), (1.0, 1.4, 1.8), 1.0, 0.4)
    call = SharedCall(2, [cheap, dear][::turn])
    call.decide()
    assert call.width == 2


def test_rows_that_no_draft_could_avoid_cost_the_budgets_nothing() -> None:
    """Another request of the call has four threads, so all have four rows; a fifth one is a draft's."""
    call = SharedCall(2, [wish(1.0, 1.9, 2.8, 3.7, 4.6, left=0.3)])
    call.decide(least=4)
    assert (call.least, call.width) == (4, 5)


def coin(accepted: float, seed: int) -> Fate:
    """Mask slots that are right with one probability."""
    draws = random.Random(seed)
    return lambda index, depth: draws.random() < accepted


@given(
    st.sampled_from((INT8, FLAT)),
    st.lists(st.floats(0, 1), min_size=2, max_size=8),
    st.integers(0, 99),
    st.integers(20, 120),
)
@settings(max_examples=25)
def test_requests_together_never_lose_more_than_their_budgets(
    table: StepCosts, accepted: list[float], seed: int, steps: int
) -> None:
    planner = DraftPlanner(table)
    fates = [coin(rate, seed + index) for index, rate in enumerate(accepted)]
    reported = decode_together(planner, DraftConfig(5, siblings=1), fates, steps)
    assert reported.time * len(fates) <= (1 + SHARE) * reported.tokens + CREDIT * len(fates) + 1e-6


def test_drafts_pay_under_load_where_rows_are_cheap() -> None:
    planner = DraftPlanner(FLAT)
    reported = decode_together(planner, DraftConfig(5, siblings=1), [coin(0.8, seed) for seed in range(8)], 200)
    assert reported.tokens / 8 / reported.time > 2


def test_the_same_curve_serves_a_block_of_visible_slots() -> None:
    planner = DraftPlanner(INT8)
    first = planner.curve(24, Sharing(1, 64))
    assert planner.curve(24, Sharing(1, 100)) is first
    assert planner.curve(24, Sharing(2, 64)) is not first


def test_similar_acceptance_rates_have_one_solution() -> None:
    planner, limits = DraftPlanner(FLAT), DraftConfig(2)
    curve = planner.curve(24, Sharing(1, 64))
    first = planner.long_run(curve, (0.71, 0.52), limits)
    assert planner.long_run(curve, (0.68, 0.49), limits) is first
    assert planner.long_run(curve, (0.78, 0.52), limits) is not first
    assert planner.long_run(curve, (0.71, 0.52), DraftConfig(2, mask_layout=MaskLayout(shift=False))) is not first


def test_a_new_runtime_starts_from_the_rates_of_its_bundle_at_the_nearest_temperature() -> None:
    lookup = (0.1, 0.2, 0.3, 0.4, 0.5)
    measured = (DraftAcceptance((0.9, 0.8), lookup), DraftAcceptance((0.4, 0.1), lookup, temperature=1.0))
    planner = DraftPlanner(FLAT, measured)
    for temperature, rates, near in ((0.0, [0.9, 0.8], True), (0.3, [0.9, 0.8], False), (0.8, [0.4, 0.1], True)):
        acceptance = planner.acceptance(temperature, 2, temperature)
        assert acceptance.reach(copying=False) == rates
        # rates of prompt lookup hold near their temperature only
        assert acceptance.lookup_probabilities(2, 0, 3) == ([0.1, 0.2, 0.3] if near else [0.3, 0.45, 0.6])


def calm() -> Iterator[float]:
    """A clock that is read every millisecond."""
    return (reading / 1000 for reading in count())


def heavy_tail() -> Iterator[float]:
    """Most readings follow each other at once, some after seconds."""
    draws = random.Random(0)
    return accumulate(draws.paretovariate(1.1) / 1000 for _ in count())


def slow_then_stopped() -> Iterator[float]:
    """A machine that slows down tenfold for a while, and a process that is stopped for an hour."""
    return accumulate(3600.0 if reading == 1200 else 0.01 if 300 <= reading < 900 else 0.001 for reading in count())


def drafted(monkeypatch: pytest.MonkeyPatch, readings: Iterator[float]) -> list[list[int]]:
    """The draft tokens of each step of twenty requests, on a machine with this clock."""
    runtime = hash_runtime(Language(3))
    for module in ("decode.step", "scheduling.scheduler"):
        monkeypatch.setattr(f"spaceport.runtime.{module}.perf_counter", readings.__next__)
    # each row costs a tenth of a step, and Python code counts
    costs = StepCosts(64, ((1, 1e-3), (64, 7.3e-3)))
    with Runtime(runtime.bundle, runtime.engine, 64, costs=costs) as steady:
        decoding = Decoding(max_tokens=50, ignore_eos=True, fork=False)
        completions = [steady.generate([1, 2, 3, seed % 7], decoding) for seed in range(20)]
    return [completion.statistics.drafted_by_step for completion in completions]


@pytest.mark.parametrize("clock", [heavy_tail, slow_then_stopped])
def test_plans_are_the_same_however_long_steps_take(
    clock: Callable[[], Iterator[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = drafted(monkeypatch, calm())
    assert sum(map(sum, expected)) > 100
    assert drafted(monkeypatch, clock()) == expected
