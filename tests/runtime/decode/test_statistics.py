"""Statistics: rows by what they hold, draft tokens step by step, why drafts are narrow, and rows for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.runtime.costs import relative_costs
from spaceport.runtime.decode import sequence_group as module
from spaceport.runtime.decode.draft import REASONS, DraftConfig, Reason
from spaceport.runtime.decode.sequence_group import SequenceGroup
from spaceport.runtime.decode.step import StepInput, step
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime
from support.hash_engine import CHILD, FORK, MASKS, HashEngine, Language, request_for
from support.hash_runtime import hash_runtime
from support.small_tokenizers import small_vocabulary
from support.token_selectors import constrained, greedy

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


def test_chains_have_the_rows_of_the_paper() -> None:
    with hash_runtime(Language(1, end_every=10**9)) as runtime:
        given = Decoding(max_tokens=13, draft="chain", mask_slots=2, fork=False, ignore_eos=True)
        found = runtime.generate(PROMPT, given).statistics
    # A group of 2 masks behind the prompt, then 2 candidates and 3 groups in each step; the last step needs one mask.
    assert (found.steps, found.drafted_by_step) == (5, [0, 2, 2, 2, 2])
    assert found.accepted_by_step == [0, 2, 2, 2, 2]
    assert (found.candidate_rows, found.mask_rows) == (8, 2 + 3 * 6 + 1)


@dataclass
class CellEngine(HashEngine):
    """A fake engine that counts the rows that it computes."""

    computed: int = 0

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.computed += batch.input_ids.size
        return super().run(batch)


def test_all_rows_that_calls_compute_are_counted() -> None:
    async def run(runtime: Runtime) -> list[Completion]:
        lengths = [(3, 0), (40, 5), (11, 2), (25, 0), (2, 3), (7, 5)]  # tokens of the prompt, mask slots
        streams = [
            runtime.astream([1 + index % 7] * tokens, Decoding(max_tokens=5 + 4 * index, fork=False, mask_slots=slots))
            for index, (tokens, slots) in enumerate(lengths)
        ]
        return [await stream.completion() for stream in streams]

    for seed in range(2):
        plain = hash_runtime(Language(seed, quality=50, end_every=30), requests=3)
        engine = CellEngine(Language(seed, quality=50, end_every=30), plain.engine.capacity, 3)
        with Runtime(plain.bundle, engine, 64) as runtime:
            found = [one.statistics for one in asyncio.run(run(runtime))]
        assert sum(one.rows + one.padding_rows for one in found) == engine.computed
        assert sum(one.padding_rows for one in found) > 0


ENDLESS = Language(3, end_every=10**9)
USELESS = replace(ENDLESS, quality=0)
MASK_SLOTS = DraftConfig(3)
Counts = dict[str, int]  # steps by reason


def finished(engine: HashEngine, *requests: SequenceGroup) -> Counts:
    """The reasons of the first request, once all have ended."""
    while any(request.live for request in requests):
        step(engine, [StepInput(request, index) for index, request in enumerate(requests) if request.live])
    return requests[0].statistics.drafts_limited


def alone(language: Language, draft_config: DraftConfig, max_tokens: int, row: float = 0.0) -> Counts:
    """A request of one thread; `row` is the cost of a further row in plain steps."""
    engine = HashEngine(language, 200, 1)
    return finished(engine, request_for(engine, [1, 2, 3], max_tokens, draft_config, costs=relative_costs(row)))


def beside_others() -> Counts:
    """A request in calls with three others; the draft tokens of all are accepted about as often."""
    engine = HashEngine(replace(ENDLESS, quality=70), 200, 4)
    prompts = [[1, 2, 3], *([1, 2, 3, token] for token in (5, 6, 7))]
    requests = [request_for(engine, prompt, 60, DraftConfig(5), costs=relative_costs(0.05)) for prompt in prompts]
    return finished(engine, *requests)


def in_threads() -> Counts:
    """A request with many threads, which share the rows of a step."""
    engine = HashEngine(replace(ENDLESS, fork_every=4), 1000, 1)
    return finished(engine, request_for(engine, [1, 2, 3], 30, MASK_SLOTS, max_threads=8, max_depth=2))


def narrow_engine() -> Counts:
    """A request on an engine that takes three rows in a step."""
    engine = HashEngine(ENDLESS, 200, 1)
    return finished(engine, request_for(engine, [1, 2, 3], 20, MASK_SLOTS, max_rows=3))


def with_grammar() -> Counts:
    """A request whose mask slots propose a character behind which the grammar allows a space only, which is banned."""
    engine = HashEngine(replace(USELESS, seed=47), 200, 1)
    tokenizer, vocabulary = small_vocabulary()
    banned = (*MASKS, FORK, CHILD, tokenizer.token_to_id("Ġ") or 0)
    selector = constrained(greedy(banned), Grammar(regex="(?:[abc]|Â )*"), vocabulary)
    return finished(engine, request_for(engine, [1, 2, 3], 20, replace(MASK_SLOTS, grammar=True), selector=selector))


SITUATIONS: list[tuple[Reason, Callable[[], Counts]]] = [
    ("budget", lambda: alone(USELESS, MASK_SLOTS, 40, row=0.1)),  # nothing is accepted
    ("not_worth_it", lambda: alone(USELESS, MASK_SLOTS, 40, row=0.3)),
    ("no_candidates", lambda: alone(ENDLESS, DraftConfig(0, lookup=4), 8)),  # nothing repeats
    ("grammar", with_grammar),
    ("end_of_text", lambda: alone(ENDLESS, MASK_SLOTS, 3)),
    ("row_limit", in_threads),
    ("row_limit", narrow_engine),
    ("shared_call", beside_others),
]


@pytest.mark.parametrize(("reason", "decode"), SITUATIONS)
def test_a_draft_is_narrow_for_this_reason(reason: Reason, decode: Callable[[], Counts]) -> None:
    assert decode()[reason] > 0


def test_every_reason_has_a_situation_and_a_text_and_full_drafts_have_none() -> None:
    assert {reason for reason, _ in SITUATIONS} == {*get_args(Reason)} == {*REASONS}
    assert alone(ENDLESS, DraftConfig(0), 20) == alone(ENDLESS, DraftConfig(3, "chain"), 20) == {}
