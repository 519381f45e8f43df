"""Reasons: each reason why a draft is narrower than its limits occurs in a decode in which it is true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest

from spaceport.runtime.costs import relative_costs
from spaceport.runtime.decode.draft import REASONS, DraftConfig, Reason
from spaceport.runtime.decode.request import Request
from spaceport.runtime.decode.step import StepInput, step
from spaceport.runtime.sampling.choice import greedy
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.grammar_compiler import constrained
from support.hash_engine import CHILD, FORK, MASKS, HashEngine, Language, request_for
from support.small_tokenizers import small_vocabulary

PROMPT = (1, 2, 3)
ENDLESS = Language(3, end_every=10**9)
MASK_SLOTS = DraftConfig(3)
LOOKUP = DraftConfig(0, lookup=4)

Counts = dict[str, int]  # steps by reason


def finished(engine: HashEngine, *requests: Request) -> Counts:
    """The reasons of the first request, once all have ended."""
    while any(request.live for request in requests):
        step(engine, [StepInput(request, index) for index, request in enumerate(requests) if request.live])
    return requests[0].statistics.drafts_limited


def alone(language: Language, draft_config: DraftConfig, max_tokens: int, row: float = 0.0) -> Counts:
    """A request of one thread; `row` is the cost of a further row in plain steps."""
    engine = HashEngine(language, 200, 1)
    return finished(engine, request_for(engine, PROMPT, max_tokens, draft_config, costs=relative_costs(row)))


def beside_others() -> Counts:
    """A request in calls with three others; the draft tokens of all are accepted about as often."""
    engine = HashEngine(replace(ENDLESS, quality=70), 200, 4)
    prompts = [PROMPT, *((*PROMPT, token) for token in (5, 6, 7))]
    requests = [request_for(engine, prompt, 60, DraftConfig(5), costs=relative_costs(0.05)) for prompt in prompts]
    return finished(engine, *requests)


def in_threads() -> Counts:
    """A request with many threads, which share the rows of a step."""
    engine = HashEngine(replace(ENDLESS, fork_every=4), 1000, 1)
    return finished(engine, request_for(engine, PROMPT, 30, MASK_SLOTS, max_threads=8, max_depth=2))


def narrow_engine() -> Counts:
    """A request on an engine that takes three rows in a step."""
    engine = HashEngine(ENDLESS, 200, 1)
    return finished(engine, request_for(engine, PROMPT, 20, MASK_SLOTS, max_rows=3))


def with_grammar() -> Counts:
    """A request whose mask slots propose a character behind which the grammar allows a space only, which is banned."""
    engine = HashEngine(replace(ENDLESS, seed=47, quality=0), 200, 1)
    tokenizer, vocabulary = small_vocabulary()
    banned = (*MASKS, FORK, CHILD, tokenizer.token_to_id("Ġ"))
    selector = constrained(greedy(banned), Grammar(regex="(?:[abc]|Â )*"), vocabulary)
    return finished(engine, request_for(engine, PROMPT, 20, replace(MASK_SLOTS, grammar=True), selector=selector))


SITUATIONS: list[tuple[Reason, Callable[[], Counts]]] = [
    ("budget", lambda: alone(replace(ENDLESS, quality=0), MASK_SLOTS, 40, row=0.1)),  # nothing is accepted
    ("not_worth_it", lambda: alone(replace(ENDLESS, quality=0), MASK_SLOTS, 40, row=0.3)),
    ("no_candidates", lambda: alone(ENDLESS, LOOKUP, 8)),  # nothing repeats
    ("grammar", with_grammar),
    ("end_of_text", lambda: alone(ENDLESS, MASK_SLOTS, 3)),
    ("row_limit", in_threads),
    ("row_limit", narrow_engine),
    ("shared_call", beside_others),
]


@pytest.mark.parametrize(("reason", "decode"), SITUATIONS)
def test_a_draft_is_narrow_for_this_reason(reason: Reason, decode: Callable[[], Counts]) -> None:
    assert decode()[reason] > 0


def test_every_reason_has_a_situation_and_a_text() -> None:
    assert {reason for reason, _ in SITUATIONS} == {*get_args(Reason)} == {*REASONS}


def test_a_request_without_drafts_has_no_reason() -> None:
    assert alone(ENDLESS, DraftConfig(0), 20) == {}


def test_a_chain_has_no_reason() -> None:
    assert alone(ENDLESS, DraftConfig(3, "chain"), 20) == {}
