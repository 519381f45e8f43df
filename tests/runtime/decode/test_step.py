"""The step loop over a fake engine: drafts change how many steps a text takes and never what it says."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.mask_layout import MaskLayout
from spaceport.graphs.contract.signature import LOWERINGS, Lowering, visible_length
from spaceport.runtime.decode.draft import DraftConfig, Shape
from spaceport.runtime.decode.pack import pack_many, pack_one
from spaceport.runtime.decode.request import Request, ScheduledStep
from spaceport.runtime.decode.step import PREFILL_ROWS, StepInput, step
from support.hash_engine import END, LAYOUTS, MASKS, HashEngine, Language, advance, request_for

PROMPTS = st.lists(st.integers(0, END - 1), min_size=1, max_size=40)


def run(engine: HashEngine, request: Request, chunk: int = PREFILL_ROWS) -> list[int]:
    while request.live:
        advance(engine, request, chunk=chunk)
    return request.threads[0].generated


def engine_for(language: Language, length: int, mask_slots: int, lowering: Lowering, requests: int = 1) -> HashEngine:
    rows = chain_rows(language.mask_layout, mask_slots)
    return HashEngine(language, visible_length(length + max(40, rows) + 1), requests, lowering)


def chain_rows(layout: MaskLayout, mask_slots: int) -> int:
    """Rows of a full chain: a group behind the last known token and behind each candidate."""
    return (mask_slots + 1) * (1 + layout.rows(mask_slots))


@settings(max_examples=300)
@given(
    prompt=PROMPTS,
    max_tokens=st.integers(1, 60),
    mask_slots=st.integers(0, 6),
    quality=st.sampled_from((0, 30, 60, 90, 100)),
    chunk=st.integers(1, 40),
    window=st.none() | st.integers(1, 30),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 10**6),
    lowering=st.sampled_from(LOWERINGS),
)
def test_drafted_text_is_plain_text(
    prompt: list[int],
    max_tokens: int,
    mask_slots: int,
    quality: int,
    chunk: int,
    window: int | None,
    layout: MaskLayout,
    seed: int,
    lowering: Lowering,
) -> None:
    language = Language(seed, quality, window=window, mask_layout=layout)
    expected = language.write(prompt, max_tokens)
    engine = engine_for(language, len(prompt) + max_tokens, mask_slots, lowering)
    request = request_for(engine, prompt, max_tokens, mask_slots)
    assert run(engine, request, chunk) == expected
    assert request.threads[0].ending == ("length" if len(expected) == max_tokens else "end")
    assert request.slots.held == 0
    assert not request.threads[0].sees.any()
    assert request.statistics.tokens == len(expected)
    assert max(engine.widths) <= max(chunk + layout.rows(mask_slots), chain_rows(layout, mask_slots))


@settings(max_examples=150)
@given(
    prompt=PROMPTS,
    draft_config=st.sampled_from(
        (DraftConfig(3, "chain"), DraftConfig(4, siblings=1, lookup=5), DraftConfig(0, siblings=1, lookup=3))
    ),
    quality=st.sampled_from((0, 60, 100)),
    chunk=st.integers(1, 40),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 10**6),
    lowering=st.sampled_from(LOWERINGS),
)
def test_drafts_in_one_line_leave_every_token_in_the_slot_that_plain_decoding_gives_it(
    prompt: list[int],
    draft_config: DraftConfig,
    quality: int,
    chunk: int,
    layout: MaskLayout,
    seed: int,
    lowering: Lowering,
) -> None:
    engine = engine_for(Language(seed, quality, mask_layout=layout), len(prompt) + 40, 4, lowering)
    request = request_for(engine, prompt, 40, draft_config)
    (thread,) = request.threads
    while request.live:
        advance(engine, request, chunk=chunk)
        slots_of_thread = np.arange(thread.fed if request.live else 0)
        assert thread.held.tolist() == slots_of_thread.tolist()
        assert request.slots.positions[slots_of_thread].tolist() == slots_of_thread.tolist()
        assert request.slots.held == slots_of_thread.size


@settings(max_examples=150)
@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=4),
    joins=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    mask_slots=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    chunk=st.integers(1, 20),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 10**6),
    lowering=st.sampled_from(LOWERINGS),
)
def test_requests_that_share_steps_write_what_each_would_alone(
    prompts: list[list[int]],
    joins: list[int],
    mask_slots: list[int],
    chunk: int,
    layout: MaskLayout,
    seed: int,
    lowering: Lowering,
) -> None:
    language = Language(seed, 70, mask_layout=layout)
    engine = engine_for(language, 40 + 30, 4, lowering, requests=5)
    requests = [request_for(engine, prompt, 30, mask_slots[i]) for i, prompt in enumerate(prompts)]
    for now in range(500):
        active = [
            StepInput(request, i + (i > 1), chunk)  # index 2 stays idle
            for i, (request, join) in enumerate(zip(requests, joins, strict=False))
            if join <= now and request.live
        ]
        step(engine, active)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.threads[0].generated == language.write(prompt, 30)
        assert request.slots.held == 0


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("masks", [MASKS[:1], MASKS])
def test_distinct_mask_tokens_are_fed_in_their_order(lowering: Lowering, masks: tuple[int, ...]) -> None:
    language = Language(5, 80)
    engine = engine_for(language, 60, 2, lowering)
    request = request_for(engine, [1, 2, 3], 40, 2, masks=masks)
    fed: list[list[int]] = []
    while request.live:
        plan = request.plan(PREFILL_ROWS)
        fed.extend([int(plan.parts[0].tokens[row]) for row in group] for group in plan.parts[0].layout.groups)
        advance(engine, request)
    assert request.threads[0].generated == language.write([1, 2, 3], 40)
    assert [masks[0], masks[-1]] in fed
    assert all(group == [masks[0], masks[-1]][: len(group)] for group in fed)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("mask_slots", "steps"), [(0, 60), (1, 30), (2, 20), (3, 15), (4, 12), (5, 10)])
def test_a_network_that_drafts_right_needs_one_step_for_each_k_plus_1_tokens(
    mask_slots: int, steps: int, layout: MaskLayout, lowering: Lowering
) -> None:
    """Tests the mask convention: one position off, and no candidate would be accepted while the output stayed right.

    The prompt step generates one token without candidates, so the last step is short of as many.
    """
    language = Language(3, 100, end_every=10**9, mask_layout=layout)
    engine = engine_for(language, 70, mask_slots, lowering)
    request = request_for(engine, [4, 5, 6], 60, mask_slots)
    assert run(engine, request) == language.write([4, 5, 6], 60)
    assert request.statistics.steps == steps + (mask_slots > 0)
    assert request.statistics.accepted_by_depth == request.statistics.drafted_by_depth


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize(("heads", "steps"), [(1, 30), (2, 20), (3, 15), (5, 10)])
def test_heads_that_predict_right_need_one_step_for_each_k_plus_1_tokens(
    heads: int, steps: int, shape: Shape, lowering: Lowering
) -> None:
    language = Language(3, 100, end_every=10**9, heads=5)
    engine = engine_for(language, 70, 5, lowering)
    request = request_for(engine, [4, 5, 6], 60, DraftConfig(heads, shape, siblings=1))
    assert run(engine, request) == language.write([4, 5, 6], 60)
    assert request.statistics.steps == steps + 1
    assert request.statistics.accepted_by_source == request.statistics.drafted_by_source == {"head": 59 - steps}
    assert request.statistics.mask_rows == 0
    assert max(engine.widths) == max(3, heads + 1)


@settings(max_examples=100)
@given(
    prompts=st.lists(PROMPTS, min_size=2, max_size=4),
    drafts=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    chunk=st.integers(1, 20),
    seed=st.integers(0, 10**6),
    lowering=st.sampled_from(LOWERINGS),
)
def test_requests_that_share_steps_draft_with_the_heads_of_their_own_rows(
    prompts: list[list[int]], drafts: list[int], chunk: int, seed: int, lowering: Lowering
) -> None:
    language = Language(seed, 100, end_every=10**9, heads=4)
    engine = engine_for(language, 40 + 30, 4, lowering, requests=4)
    requests = [request_for(engine, prompt, 20, heads) for prompt, heads in zip(prompts, drafts, strict=False)]
    while any(request.live for request in requests):
        step(engine, [StepInput(request, i, chunk) for i, request in enumerate(requests) if request.live])
    for request, prompt, heads in zip(requests, prompts, drafts, strict=False):
        assert request.threads[0].generated == language.write(prompt, 20)
        assert request.statistics.steps == 1 + -(-19 // (heads + 1))


@pytest.mark.parametrize("shift", [True, False])
def test_candidates_of_the_wrong_shift_are_rejected(shift: bool) -> None:
    """The model predicts exactly, but its mask rows mean other positions than the request takes them for."""
    language = Language(3, 100, end_every=10**9, mask_layout=MaskLayout(shift))
    engine = engine_for(language, 70, 3, "scatter")
    request = request_for(engine, [4, 5, 6], 60, 3)
    language.mask_layout = MaskLayout(not shift)
    assert run(engine, request) == language.write([4, 5, 6], 60)
    assert request.statistics.steps > 45
    assert request.statistics.acceptance_rate < 0.2


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_mask_rows_of_the_wrong_visibility_are_noticed(layout: MaskLayout) -> None:
    language = Language(3, 100, mask_layout=layout)
    engine = engine_for(language, 70, 3, "scatter")
    request = request_for(engine, [4, 5, 6], 60, 3)
    language.mask_layout = MaskLayout(layout.shift, "block" if layout.group == "causal" else "causal")
    with pytest.raises(AssertionError, match=r"another group|see different rows"):
        run(engine, request)


def test_no_rows_are_fed_for_tokens_beyond_the_limit() -> None:
    language = Language(3, 100, end_every=10**9)
    engine = engine_for(language, 70, 3, "scatter")
    run(engine, request_for(engine, [1], 5, 3))
    # x m m m; then four tokens are left, which x and three candidates write: behind x two more could follow its own
    # token, behind the first candidate one, behind the others none
    assert engine.widths == [4, 4 + 2 + 1]


def test_a_step_costs_no_call_for_a_finished_request() -> None:
    language = Language(9, 100)
    engine = engine_for(language, 70, 2, "scatter", requests=2)
    short = request_for(engine, [1], 1, 2)
    long = request_for(engine, [2], 20, 2)
    advance(engine, short, long)
    calls = engine.calls
    assert not short.live
    while long.live:
        step(engine, [StepInput(long, 1)])
    assert engine.calls - calls == long.statistics.steps - 1


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[-1]], ids=str)
def test_the_short_way_of_packing_one_request_makes_the_same_arrays(
    lowering: Lowering, window: int | None, chunk: int, layout: MaskLayout
) -> None:
    language = Language(4, 60, window=window, mask_layout=layout)
    engine = engine_for(language, 80, 3, lowering)
    request = request_for(engine, list(range(9)), 40, 3)
    while request.live:
        probe = deepcopy(request)
        plan = probe.plan(chunk)
        planned = ScheduledStep(probe, 0, plan, probe.slots.take(plan.positions))
        one = pack_one(engine.signature, planned).arrays(engine.signature)
        many = pack_many(engine, [planned]).arrays(engine.signature)
        for (name, array), (other, expected) in zip(one, many, strict=True):
            assert name == other
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(array, expected, err_msg=name)
        advance(engine, request, chunk=chunk)
