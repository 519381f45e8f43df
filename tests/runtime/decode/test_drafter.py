"""Drafters: drafts pay where they are accepted, and cost next to nothing where they are not; in modelled time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.draft_acceptance import DraftAcceptance
from spaceport.graphs.contract.mask_layout import MaskLayout
from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.costs import StepCosts
from spaceport.runtime.decode.accept import Verdict
from spaceport.runtime.decode.acceptance import Acceptance
from spaceport.runtime.decode.draft import Candidates, Draft, DraftConfig
from spaceport.runtime.decode.drafter import TreeDrafter, drafter_for
from spaceport.runtime.decode.plan import plan_thread
from spaceport.runtime.decode.planner import CREDIT, SHARE, DraftPlanner, SharedCall, Sharing
from spaceport.runtime.decode.threads import new_thread
from spaceport.runtime.decode.tree import Outlook, tree
from support.acceptance_process import TOKENS, Fate, decode

FLOAT32 = StepCosts(64, ((1, 1.0), (4, 1.12), (9, 1.4), (16, 1.6), (36, 2.5)), relative=True)
INT8 = StepCosts(64, ((1, 1.0), (4, 1.2), (9, 1.4), (16, 1.65), (36, 2.7)), relative=True)
INT4 = StepCosts(64, ((1, 1.0), (2, 2.1), (4, 2.3), (9, 3.0), (16, 4.0), (36, 7.0)), relative=True)
FLAT = StepCosts(64, ((1, 1.0), (36, 1.05), (64, 1.1)), relative=True)
JUMPS = StepCosts(64, ((1, 1.0), (8, 1.0), (9, 1.9), (16, 1.9), (17, 2.8), (64, 2.9)), relative=True)
SHORT = StepCosts(64, ((1, 3e-4), (4, 3.3e-4), (64, 2e-3)))  # Python code takes a part of each step
TABLES = st.sampled_from((FLOAT32, INT8, INT4, FLAT, JUMPS, SHORT))


def planner(table: StepCosts) -> DraftPlanner:
    """One that has seen nothing yet."""
    return DraftPlanner(table)


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
    """Acceptance that is steady, drifts, comes in bursts, or turns against what was just learned."""
    kind = draw(st.sampled_from(("steady", "drift", "bursts", "adverse")))
    seed, accepted = draw(st.integers(0, 99)), draw(st.floats(0, 1))
    draws = random.Random(seed)
    period = draw(st.integers(5, 80))
    state = {"streak": 0}

    def right(index: int, depth: int) -> bool:
        if kind == "steady":
            return draws.random() < accepted
        if kind == "drift":
            return draws.random() < (accepted if index % (4 * period) < 2 * period else 0.05)
        if kind == "bursts":
            return index // period % 2 == 0
        state["streak"] += 1
        return state["streak"] % period < period // 3

    return right


@given(TABLES, fates(), st.integers(1, 8), st.integers(30, 300))
@settings(max_examples=60)
def test_no_fate_of_drafts_costs_more_than_the_bound(table: StepCosts, fate: Fate, slots: int, length: int) -> None:
    reported = decode(planner(table), DraftConfig(slots), fate, length)
    assert reported.time <= (1 + SHARE) * reported.tokens + CREDIT + 1e-9


@pytest.mark.parametrize("table", [FLOAT32, INT8, INT4, FLAT, JUMPS])
def test_drafts_that_are_never_right_stop(table: StepCosts) -> None:
    assert decode(planner(table), DraftConfig(5), lambda index, depth: False, 1000).speedup >= 0.97


@pytest.mark.parametrize(
    ("table", "accepted", "least"),
    [(FLOAT32, 0.79, 1.75), (INT8, 0.79, 1.75), (INT4, 0.79, 1.0), (FLAT, 0.79, 3.0), (FLOAT32, 0.46, 1.15)],
)
def test_drafts_that_are_right_pay(table: StepCosts, accepted: float, least: float) -> None:
    reported = decode(planner(table), DraftConfig(5, siblings=1), coin(accepted), 3000)
    assert reported.speedup >= least


def test_wide_groups_alternate_with_steps_that_verify_them() -> None:
    """32 mask slots in a block: 34 rows are enough for them behind one token, or to verify their candidates, not for both."""
    limits = DraftConfig(32, rows=34, siblings=1, mask_layout=MaskLayout(shift=False, group="block"))
    widths: list[int] = []
    reported = decode(planner(FLAT), limits, coin(0.9), 1000, on_step=widths.append)
    assert reported.speedup > 4
    pairs = [(one, two) for one, two in pairwise(widths) if one == 34 and two <= 16]
    assert len(pairs) > len(widths) / 16
    wider = replace(limits, rows=66)
    assert decode(planner(FLAT), wider, coin(0.9), 1000).speedup > reported.speedup


def test_what_one_request_learned_the_next_one_knows() -> None:
    """Where all drafts are right, the next text is written faster from its first tokens on."""
    shared = planner(FLOAT32)
    first = decode(shared, DraftConfig(8), lambda index, depth: True, 30)
    for _ in range(5):
        decode(shared, DraftConfig(8), lambda index, depth: True, 200)
    assert decode(shared, DraftConfig(8), lambda index, depth: True, 30).speedup > 1.1 * first.speedup


def test_kinds_of_requests_learn_apart() -> None:
    shared = planner(INT8)
    for _ in range(8):
        decode(shared, DraftConfig(5), lambda index, depth: False, 60, "sampled")
    again = decode(shared, DraftConfig(5), coin(0.9), 200, "greedy")
    assert again.time == decode(planner(INT8), DraftConfig(5), coin(0.9), 200, "greedy").time


def small_model(seconds: float) -> DraftPlanner:
    """Costs of an engine whose plain step takes so long, with nothing spent outside of it."""
    table = StepCosts(64, tuple((rows, seconds * time) for rows, time in FLOAT32.single))
    return DraftPlanner(table)


def plans_of(planner: DraftPlanner, fate: Fate, length: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many steps of a text planned a draft."""
    plans = 0

    def counting(*given: Any) -> Draft:
        nonlocal plans
        plans += 1
        return tree(*given)

    monkeypatch.setattr("spaceport.runtime.decode.drafter.tree", counting)
    decode(planner, DraftConfig(5, lookup=0), fate, length)
    return plans


def test_planning_is_rare_where_steps_are_short_and_drafts_never_right(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plans_of(small_model(5e-4), lambda index, depth: False, 2000, monkeypatch) <= 0.3 * 2000


class LookupText:
    """A text of one thread whose mask slots are never right, so that it drafts by prompt lookup; tokens are given."""

    def __init__(self, prompt: Sequence[int], planner: DraftPlanner) -> None:
        self.drafter = TreeDrafter(DraftConfig(5, lookup=16), planner, "")
        self.drafter._acceptance = Acceptance(5, DraftAcceptance((0.0,)))
        self.thread = new_thread(prompt, 8, lookup=True)
        self.thread.fed = len(prompt) - 1

    def draft(self) -> Draft:
        return self.drafter.draft(self.thread, 10**6, 64, Sharing(1, 64))

    def write(self, *tokens: int) -> Draft:
        """One step that generates these tokens, and its draft."""
        draft = self.draft()
        self.drafter.learn(plan_thread(self.thread, draft, TOKENS, 512), Verdict((0,), tokens, ()))
        self.thread.tokens += tokens
        self.thread.fed += len(tokens)
        return draft


@pytest.mark.parametrize("new_tokens", [1, 30, 300])
def test_probable_looked_up_tokens_are_drafted_at_once_where_planning_takes_long(new_tokens: int) -> None:
    text = LookupText([5, 6, 7, 8], small_model(2e-4))
    for token in range(100, 100 + new_tokens):
        assert text.write(token).rows == 1
    for token in (5, 6, 7):
        text.write(token)
    assert text.draft().tokens[:2] == (8, 100)


def test_a_wrong_looked_up_token_ends_what_counts_as_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    outlooks: list[Outlook] = []

    def recording(*given: Any) -> Draft:
        outlooks.append(given[-1])
        return tree(*given)

    monkeypatch.setattr("spaceport.runtime.decode.drafter.tree", recording)
    text = LookupText([*range(10, 40), 77, 78, 10, 11], planner(FLOAT32))
    text.write(*range(12, 20))
    text.draft()
    text.write(20, 99)  # 21 came from prompt lookup
    text.write(14)
    text.write(15)
    text.draft()
    _, copying, *_, behind_two = (outlook.lookup[0] for outlook in outlooks if outlook.lookup)
    assert copying > 0.8 > behind_two


@pytest.mark.parametrize(("left", "tokens", "masks"), [(0.0, 0, 0), (0.15, 1, 0), (0.25, 2, 1), (0.45, 3, 2)])
def test_half_of_what_is_left_is_reserved_for_the_tokens_of_mask_slots(left: float, tokens: int, masks: int) -> None:
    table = StepCosts(64, ((1, 1.0), (64, 7.3)), relative=True)  # 0.1 plain steps for each row
    drafter = TreeDrafter(DraftConfig(5, lookup=0), planner(table), "")
    drafter.left = left
    thread = new_thread([1, 2, 3], 8)
    draft = drafter.draft(thread, 100, 64, Sharing(1, 64))
    assert (sum(draft.masks), draft.limited) == (masks, "budget")
    thread.candidates = tuple(Candidates((token,), (0.9,)) for token in (7, 8, 9))
    assert drafter.draft(thread, 100, 64, Sharing(1, 64)).tokens == (7, 8, 9)[:tokens]


@pytest.mark.parametrize(("left", "tokens"), [(0.3, 0), (0.4, 1), (0.8, 2)])
def test_threads_share_what_is_left(left: float, tokens: int) -> None:
    table = StepCosts(64, ((1, 0.9), (2, 1.0), (64, 7.2)), relative=True)  # two threads: 0.2 for a row of each
    drafter = TreeDrafter(DraftConfig(5, lookup=0), planner(table), "")
    drafter.left = left
    thread = new_thread([1, 2, 3], 8)
    thread.candidates = tuple(Candidates((token,), (0.9,)) for token in (7, 8, 9))
    assert drafter.draft(thread, 100, 64, Sharing(2, 64)).tokens == (7, 8, 9)[:tokens]


def test_a_request_without_drafts_counts_when_others_choose_the_width_of_a_call() -> None:
    shared = SharedCall(2)
    drafter = drafter_for(DraftConfig(0, lookup=0), planner(FLOAT32))
    thread = new_thread([1, 2, 3], 8)
    assert drafter.draft(thread, 100, 64, Sharing(1, 64, shared)).rows == 1
    (wish,) = shared.wishes
    assert (list(wish.worth), wish.rate, wish.left) == ([1.0], 1.0, 0.0)


def test_a_chain_ends_before_a_mask_slot_without_a_probable_token() -> None:
    drafter = drafter_for(DraftConfig(mask_slots=3, shape="chain"), planner(FLOAT32))
    thread = new_thread([1, 2], 64)
    known, nothing = Candidates((7,), (0.9,)), Candidates((), ())
    for candidates, expected in (
        ((known, known, known), (7, 7, 7)),
        ((known, nothing, known), (7,)),
        ((nothing, known, known), ()),
    ):
        thread.candidates = candidates
        assert drafter.draft(thread, 50, 64, Sharing()).tokens == expected


@pytest.mark.parametrize(("left", "limited"), [(0.2, "not_worth_it"), (-0.2, "budget")])
def test_a_request_in_debt_plans_nothing_in_a_shared_call(left: float, limited: str) -> None:
    shared, costs = SharedCall(2), StepCosts(64, ((1, 2e-4), (64, 1e-2)))
    drafter = TreeDrafter(DraftConfig(5, lookup=0), DraftPlanner(costs), "")
    drafter.left = left
    draft = drafter.draft(new_thread([1, 2, 3], 8), 100, 64, Sharing(1, 64, shared))
    assert (draft.rows, draft.limited) == (1, limited)
    (wish,) = shared.wishes
    assert wish.left == left


def test_a_call_that_is_wide_for_other_reasons_is_not_charged() -> None:
    shared = SharedCall(2)
    drafter = TreeDrafter(DraftConfig(5, lookup=0), planner(INT8), "")
    thread = new_thread([1, 2, 3], 8)
    thread.fed = 2
    drafter.left = -5.0  # so it drafts nothing itself
    drafter.draft(thread, 100, 64, Sharing(1, 64, shared))
    shared.decide(least=9)
    drafter.learn(plan_thread(thread, Draft(), TOKENS, 512), Verdict((0,), (4,), ()))
    assert drafter.left == pytest.approx(-5.0 + SHARE)


def test_what_is_left_is_time_and_not_steps() -> None:
    """Eight threads take as long as one here, so a step that they share saves the last one an eighth of a step."""
    table = StepCosts(64, ((1, 1.0), (8, 1.0), (64, 8.0)), relative=True)
    drafter = TreeDrafter(DraftConfig(5, lookup=0), planner(table), "")
    thread = new_thread([1, 2, 3], 8)
    drafter.draft(thread, 100, 64, Sharing(8, 64))
    drafter.left = 16.0
    drafter.draft(thread, 100, 64, Sharing(1, 64))
    assert drafter.left == pytest.approx(2.0)


def test_a_correction_of_the_first_candidate_counts_before_a_tree_is_grown() -> None:
    class Corrected(Candidates):
        def behind(self, token: int) -> Candidates:
            return Candidates(self.tokens, (0.8,))

    table = StepCosts(64, ((1, 1.0), (64, 32.5)), relative=True)  # half a plain step for each row
    drafter = TreeDrafter(DraftConfig(1, lookup=0), planner(table), "")
    drafter.left = 9.0
    thread = new_thread([1, 2, 3], 8)
    thread.candidates = (Corrected((7,), (0.3,)),)
    assert drafter.draft(thread, 100, 64, Sharing(1, 64)).tokens == (7,)


def test_many_rows_take_no_longer_to_plan_than_a_step_has() -> None:
    drafter = TreeDrafter(DraftConfig(5, rows=10**6, lookup=0), planner(FLAT), "")
    drafter.draft(new_thread([1, 2, 3], 8), 100, 64, Sharing(1, 64))
    assert len(drafter._planned[()].curve.times) == STEP_ROWS


def test_copied_text_ends_where_the_budget_allows_no_look_up() -> None:
    text = LookupText([*range(10, 40), 77, 78, 10, 11], planner(FLOAT32))
    text.write(*range(12, 20))
    assert text.drafter._copied[()] >= 4
    text.drafter.left = -9.0
    assert text.write(20).limited == "budget"
    text.drafter.left = 9.0
    text.draft()
    assert text.drafter._planned[()].copied == 0
