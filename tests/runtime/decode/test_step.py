"""The step loop over a fake engine: drafts and forks change how many steps a text takes and never what it says; all is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.draft_methods import CAUSAL, MaskLayout
from spaceport.graphs.contract.signature import LOWERINGS, STEP_ROWS, Lowering, visible_length
from spaceport.runtime.costs import relative_costs
from spaceport.runtime.decode import sequence_group as module
from spaceport.runtime.decode.draft import Draft, DraftConfig, Reason, Shape
from spaceport.runtime.decode.plan import Part, Verdict
from spaceport.runtime.decode.planner import Sharing
from spaceport.runtime.decode.sequence import Slots, TokenSequence
from spaceport.runtime.decode.sequence_group import RequestStep, SequenceGroup
from spaceport.runtime.decode.step import step
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.session import Runtime
from support.arrivals import DRAFT_CONFIGS, LANGUAGES
from support.hash_engine import (
    CHILD,
    END,
    FORK,
    LAYOUTS,
    MASKS,
    HashEngine,
    Language,
    Tree,
    advance,
    completed,
    constrained,
    greedy,
    request_for,
)
from support.hash_runtime import hash_runtime
from support.small_tokenizers import small_vocabulary

PROMPTS = st.lists(st.integers(0, END - 1), min_size=1, max_size=30)


def engine_for(language: Language, most: int, lowering: Lowering, requests: int = 1) -> HashEngine:
    """An engine with KV slots for this number of tokens and one more step."""
    return HashEngine(language, visible_length(most + STEP_ROWS + 1), requests, lowering)


def text_of(request: SequenceGroup) -> Tree:
    return {thread.path: thread.generated for thread in request.threads}


def size(tree: Tree) -> int:
    return sum(len(text) for text in tree.values()) + len(tree) - 1


@pytest.mark.slow
@pytest.mark.parametrize("examples", [pytest.param(300), pytest.param(20_000, marks=pytest.mark.nightly)])
def test_every_thread_writes_what_it_would_alone_whatever_is_drafted(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        language, prompt, draft_config = data.draw(LANGUAGES), data.draw(PROMPTS), data.draw(DRAFT_CONFIGS)
        max_tokens, chunk = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
        max_threads, max_depth = data.draw(st.sampled_from((1, 2, 3, 8, 64))), data.draw(st.integers(0, 3))
        lowering = data.draw(st.sampled_from(LOWERINGS))
        limit = len(prompt) + max_tokens
        expected = language.tree(prompt, limit, max_depth)
        total = size(expected) + 1  # one more than is needed
        engine = engine_for(language, len(prompt) + total, lowering)
        options = {"max_threads": max_threads, "max_depth": max_depth, "total": total}
        request = request_for(engine, prompt, max_tokens, draft_config, **options)  # type: ignore[arg-type]
        request.slots = Slots(len(prompt) + total + STEP_ROWS + 1, lowering)  # as few as are enough
        request.slots.positions = np.zeros(engine.capacity, np.int64)  # masks are as wide as the engine's buffers allow
        completed(engine, request, chunk)
        assert text_of(request) == expected
        for thread in request.threads:
            assert thread.ending == ("length" if len(thread.tokens) >= limit else "end")
            assert not thread.visible.any()
        assert request.slots.held == request.slots.height == 0
        assert request.statistics.tokens == size(expected) - len(expected) + 1
        assert request.statistics.peak_threads <= max_threads
        assert max(engine.widths) <= STEP_ROWS
        if len(expected) == 1 and draft_config.shape == "chain" and not language.heads:
            slots = draft_config.mask_slots
            group = 1 + language.mask_layout.rows(slots)  # behind the last known token and behind each candidate
            # the end of the prompt and its draft, which counts the last row of the prompt
            widest = max((slots + 1) * group, draft_config.rows)
            assert max(engine.widths) <= chunk - 1 + widest

    holds()


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data())
def test_a_request_that_reaches_its_total_ends_its_threads_where_they_are_and_holds_nothing(
    data: st.DataObject,
) -> None:
    language, prompt, draft_config = data.draw(LANGUAGES), data.draw(PROMPTS), data.draw(DRAFT_CONFIGS)
    total, max_threads = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 8))
    expected = language.tree(prompt, len(prompt) + 30, 2)
    engine = engine_for(language, len(prompt) + total, data.draw(st.sampled_from(LOWERINGS)))
    request = request_for(engine, prompt, 30, draft_config, max_threads=max_threads, max_depth=2, total=total)
    completed(engine, request)
    assert request.added == min(total, size(expected))
    for thread in request.threads:
        assert thread.generated == expected[thread.path][: len(thread.generated)]
        assert thread.ending == "total" or thread.generated == expected[thread.path]
    assert request.slots.held == 0


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_drafts_in_one_line_leave_every_token_in_the_slot_that_plain_decoding_gives_it(data: st.DataObject) -> None:
    lines = (DraftConfig(3, "chain"), DraftConfig(4, siblings=1, lookup=5), DraftConfig(0, siblings=1, lookup=3))
    layout = data.draw(st.sampled_from(LAYOUTS))
    language = Language(data.draw(st.integers(0, 10**6)), data.draw(st.sampled_from((0, 60, 100))), mask_layout=layout)
    prompt, chunk = data.draw(PROMPTS), data.draw(st.integers(1, 40))
    engine = engine_for(language, len(prompt) + 40, data.draw(st.sampled_from(LOWERINGS)))
    request = request_for(engine, prompt, 40, data.draw(st.sampled_from(lines)))
    (thread,) = request.threads
    while request.live:
        advance(engine, request, chunk=chunk)
        slots_of_thread = np.arange(thread.fed if request.live else 0)
        assert thread.held.tolist() == slots_of_thread.tolist()
        assert request.slots.positions[slots_of_thread].tolist() == slots_of_thread.tolist()
        assert request.slots.held == slots_of_thread.size


@pytest.mark.slow
@settings(max_examples=80)
@given(st.data())
def test_requests_that_share_steps_write_and_draft_what_each_would_alone(data: st.DataObject) -> None:
    """They draft with the mask slots or heads of their own rows: all are right, so the steps can be counted."""
    layout, heads = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.sampled_from((0, 4)))
    seed, chunk = data.draw(st.integers(0, 10**6)), data.draw(st.integers(1, 20))
    language = Language(seed, 100, end_every=10**9, mask_layout=layout, heads=heads)
    engine = engine_for(language, 40 + 30, data.draw(st.sampled_from(LOWERINGS)), requests=5)
    prompts = data.draw(st.lists(PROMPTS, min_size=1, max_size=4))
    joins = [data.draw(st.integers(0, 12)) for _ in prompts]
    drafts = [data.draw(st.integers(0, 4)) for _ in prompts]
    requests = [request_for(engine, prompt, 20, count) for prompt, count in zip(prompts, drafts, strict=True)]
    for now in range(100):
        active = [
            RequestStep(request, i + (i > 1), chunk)  # index 2 stays idle
            for i, (request, join) in enumerate(zip(requests, joins, strict=True))
            if join <= now and request.live
        ]
        step(engine, active)
    for request, prompt, count in zip(requests, prompts, drafts, strict=True):
        assert request.threads[0].generated == language.write(prompt, 20)
        assert request.slots.held == 0
        assert request.statistics.steps == 1 + -(-19 // (count + 1))


DRAFTED: list[tuple[MaskLayout, int, Shape]] = [*((layout, 0, "chain") for layout in LAYOUTS)]
DRAFTED += [(CAUSAL, 5, "chain"), (CAUSAL, 5, "tree")]


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("layout", "heads", "shape"), DRAFTED)
@pytest.mark.parametrize("count", range(6))
def test_mask_slots_or_heads_that_are_right_need_one_step_for_each_k_plus_1_tokens(
    count: int, layout: MaskLayout, heads: int, shape: Shape, lowering: Lowering
) -> None:
    """Tests the mask convention: one position off, and no candidate would be accepted while the output stayed right.

    The prompt step generates one token without candidates, so the last step is short of as many.
    """
    language = Language(3, 100, end_every=10**9, mask_layout=layout, heads=heads)
    engine = engine_for(language, 70, lowering)
    request = completed(engine, request_for(engine, [4, 5, 6], 60, DraftConfig(count, shape, siblings=1)))
    assert text_of(request)[()] == language.write([4, 5, 6], 60)
    found, steps = request.statistics, 60 // (count + 1)
    assert found.steps == steps + (count > 0)
    assert found.accepted_by_depth == found.drafted_by_depth
    source = {("head" if heads else "mask"): 59 - steps} if count else {}
    assert found.accepted_by_source == found.drafted_by_source == source
    if heads:
        assert found.mask_rows == 0
        assert max(engine.widths) == max(3, count + 1)


def narrow(language: Language, lowering: Lowering, requests: int = 1) -> tuple[Runtime, HashEngine]:
    """A runtime over an engine that takes as few rows per request as any."""
    wide = hash_runtime(language, 320, requests=requests, lowering=lowering)
    engine = HashEngine(language, wide.engine.capacity, requests, lowering)
    engine.rows = STEP_ROWS
    return Runtime(wide.bundle, engine, 320), engine


@pytest.mark.slow
@settings(max_examples=30)
@given(st.data())
def test_the_end_of_a_prompt_and_its_draft_fit_into_a_call(data: st.DataObject) -> None:
    """No call has more rows of a request than its engine takes, and narrow engines write what others do."""
    lengths = data.draw(
        st.lists(st.integers(STEP_ROWS - 8, STEP_ROWS + 8) | st.integers(1, 270), min_size=1, max_size=3)
    )
    shape: Shape = data.draw(st.sampled_from(("chain", "tree")))
    decoding = Decoding(max_tokens=12, mask_slots=data.draw(st.integers(0, 5)), draft=shape)
    language, lowering = Language(data.draw(st.integers(0, 99)), fork_every=4), data.draw(st.sampled_from(LOWERINGS))
    prompts = [[position % 7 for position in range(length)] for length in lengths]
    runtime, engine = narrow(language, lowering, len(lengths))
    with hash_runtime(language, 320, lowering=lowering) as wide, runtime:
        streams = [runtime.stream(prompt, decoding) for prompt in prompts]
        got = [[thread.tokens for thread in stream.completion().threads] for stream in streams]
        assert got == [[thread.tokens for thread in wide.generate(prompt, decoding).threads] for prompt in prompts]
    assert max(engine.widths) <= STEP_ROWS


def test_a_prompt_is_cut_no_earlier_for_its_draft() -> None:
    for length in range(STEP_ROWS - 6, STEP_ROWS + 2):
        runtime, engine = narrow(Language(1), "scatter")
        with runtime:
            assert runtime.generate([1] * length, Decoding(max_tokens=1, mask_slots=5)).statistics.steps == 1
        assert len(engine.widths) == (1 if length <= STEP_ROWS else 2)


PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize("draft", ["tree", "chain"])
@pytest.mark.parametrize("fork", [False, True])
def test_each_row_and_each_step_is_counted_once(draft: str, fork: bool) -> None:
    for seed in range(5):
        with hash_runtime(Language(seed, quality=60, fork_every=9), max_slots=400) as runtime:
            found = runtime.generate(PROMPT, Decoding(max_tokens=30, draft=draft, fork=fork)).statistics  # type: ignore[arg-type]
        drafted, accepted = found.drafted_by_step, found.accepted_by_step
        assert len(drafted) == len(accepted) == found.steps
        assert (sum(drafted), sum(accepted)) == (sum(found.drafted_by_depth), sum(found.accepted_by_depth))
        assert all(0 <= kept <= given for kept, given in zip(accepted, drafted, strict=True))
        assert found.candidate_rows == sum(found.drafted_by_depth)
        assert found.mask_rows > 0
        known = found.rows - found.candidate_rows - found.mask_rows
        fed = len(PROMPT) + found.tokens - sum(found.accepted_by_depth) + found.threads - 1  # [Child] of each fork
        assert fed - found.threads <= known <= fed  # the last token of a thread is not fed
        assert found.padding_rows == 0
        assert found.tokens_per_step == found.tokens / found.steps
        assert found.acceptance_rate == sum(accepted) / sum(drafted)
        assert found.mean_acceptance_length == (1 + sum(accepted) / found.steps if found.threads == 1 else None)
    nothing = module.Statistics()
    rates = (nothing.tokens_per_step, nothing.acceptance_rate, nothing.tokens_per_second)
    assert (*rates, nothing.mean_acceptance_length) == (0, 0, 0, None)


def test_all_rows_that_calls_compute_are_counted() -> None:
    lengths = [(3, 0), (40, 5), (11, 2), (25, 0), (2, 3), (7, 5)]  # tokens of the prompt, mask slots
    for seed in range(2):
        language, computed = Language(seed, quality=50, end_every=30), list[int]()
        note = lambda batch, computed=computed: computed.append(batch.input_ids.size)  # noqa: E731
        with hash_runtime(language, requests=3, before=note) as runtime:
            streams = [
                runtime.stream([1 + i % 7] * tokens, Decoding(max_tokens=5 + 4 * i, fork=False, mask_slots=slots))
                for i, (tokens, slots) in enumerate(lengths)
            ]
            found = [stream.completion().statistics for stream in streams]
        assert sum(one.rows + one.padding_rows for one in found) == sum(computed)
        assert sum(one.padding_rows for one in found) > 0


ENDLESS = Language(3, end_every=10**9)
USELESS = replace(ENDLESS, quality=0)
MASK_SLOTS = DraftConfig(3)
Counts = dict[str, int]  # steps by reason


def finished(engine: HashEngine, *requests: SequenceGroup) -> Counts:
    """The reasons of the first request, once all have ended."""
    while any(request.live for request in requests):
        step(engine, [RequestStep(request, index) for index, request in enumerate(requests) if request.live])
    return requests[0].statistics.drafts_limited


def alone(
    language: Language, draft_config: DraftConfig, max_tokens: int, row: float = 0.0, slots: int = 200, **options: Any
) -> Counts:
    """A request in calls of its own; `row` is the cost of a further row in plain steps."""
    engine = HashEngine(language, slots, 1)
    return finished(
        engine, request_for(engine, [1, 2, 3], max_tokens, draft_config, costs=relative_costs(row), **options)
    )


def beside_others() -> Counts:
    """A request in calls with three others; the draft tokens of all are accepted about as often."""
    engine = HashEngine(replace(ENDLESS, quality=70), 200, 4)
    prompts = [[1, 2, 3], *([1, 2, 3, token] for token in (5, 6, 7))]
    requests = [request_for(engine, prompt, 60, DraftConfig(5), costs=relative_costs(0.05)) for prompt in prompts]
    return finished(engine, *requests)


def with_grammar() -> Counts:
    """A request whose mask slots propose a character behind which the grammar allows a space only, which is banned."""
    tokenizer, vocabulary = small_vocabulary()
    banned = (*MASKS, FORK, CHILD, tokenizer.token_to_id("Ġ") or 0)
    selector = constrained(greedy(banned), Grammar(regex="(?:[abc]|Â )*"), vocabulary)
    return alone(replace(USELESS, seed=47), replace(MASK_SLOTS, grammar=True), 20, selector=selector)


@dataclass
class Silent:
    """A drafter that drafts nothing."""

    drafts: bool
    asked: int = 0
    learned: int = 0

    def draft(self, thread: TokenSequence, remaining: int, rows: int, sharing: Sharing) -> Draft:
        self.asked += 1
        return Draft()

    def learn(self, part: Part, verdict: Verdict) -> None:
        self.learned += 1


def test_a_drafter_learns_from_each_step_of_which_it_was_asked_and_without_sources_only_beside_others() -> None:
    engine = HashEngine(ENDLESS, 200, 2)
    plain, drafting = (request_for(engine, [1, 2, 3], 20, 0) for _ in range(2))
    plain.drafter, drafting.drafter = without, able = Silent(False), Silent(True)
    for _ in range(3):
        advance(engine, plain)
    assert (without.asked, without.learned) == (0, 0)
    for _ in range(3):  # the first one feeds the prompt of the other request
        advance(engine, plain, drafting)
    assert (without.asked, without.learned) == (2, 2)
    assert (able.asked, able.learned) == (3, 3)


SITUATIONS: list[tuple[Reason, Callable[[], Counts]]] = [
    ("budget", lambda: alone(USELESS, MASK_SLOTS, 40, row=0.1)),  # nothing is accepted
    ("not_worth_it", lambda: alone(USELESS, MASK_SLOTS, 40, row=0.3)),
    ("no_candidates", lambda: alone(ENDLESS, DraftConfig(0, lookup=4), 8)),  # nothing repeats
    ("grammar", with_grammar),
    ("end_of_text", lambda: alone(ENDLESS, MASK_SLOTS, 3)),
    # many threads share the rows of a step
    (
        "row_limit",
        lambda: alone(replace(ENDLESS, fork_every=4), MASK_SLOTS, 60, slots=1000, max_threads=8, max_depth=2),
    ),
    ("row_limit", lambda: alone(ENDLESS, MASK_SLOTS, 20, max_rows=3)),
    ("shared_call", beside_others),
]


@pytest.mark.parametrize(("reason", "decode"), SITUATIONS)
def test_a_draft_is_narrow_for_this_reason(reason: Reason, decode: Callable[[], Counts]) -> None:
    assert decode()[reason] > 0


def test_every_reason_has_a_situation_and_a_text_and_full_drafts_have_none() -> None:
    assert {reason for reason, _ in SITUATIONS} == {*get_args(Reason)}
    assert alone(ENDLESS, DraftConfig(0), 20) == alone(ENDLESS, DraftConfig(3, "chain"), 20) == {}
