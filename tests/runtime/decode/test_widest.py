"""Widest: no call has more rows of a request than its engine takes, and narrow engines write what others do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.signature import LOWERINGS, STEP_ROWS, Lowering
from spaceport.runtime import Decoding, Runtime
from spaceport.runtime.decode.draft import Shape
from spaceport.tools.verify.acceptance.answers import generate_answer
from support.hash_engine import HashEngine, Language
from support.hash_runtime import hash_runtime

LENGTH = 320


def narrow(language: Language, lowering: Lowering, requests: int = 1, rows: int = STEP_ROWS) -> Runtime:
    """A runtime over an engine that takes this number of rows per request."""
    wide = hash_runtime(language, LENGTH, requests=requests, lowering=lowering)
    engine = HashEngine(language, wide.engine.capacity, requests, lowering)
    engine.rows = rows
    return Runtime(wide.bundle, engine, LENGTH)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(STEP_ROWS - 8, STEP_ROWS + 8) | st.integers(1, 270), min_size=1, max_size=3),
    mask_slots=st.integers(0, 5),
    draft=st.sampled_from(("chain", "tree")),
    lowering=st.sampled_from(LOWERINGS),
    seed=st.integers(0, 99),
)
def test_the_end_of_a_prompt_and_its_draft_fit_into_a_call(
    lengths: list[int], mask_slots: int, draft: Shape, lowering: Lowering, seed: int
) -> None:
    language = Language(seed, fork_every=4)
    decoding = Decoding(max_tokens=12, mask_slots=mask_slots, draft=draft)
    prompts = [[position % 7 for position in range(length)] for length in lengths]
    wide = hash_runtime(language, LENGTH, lowering=lowering)
    with wide, narrow(language, lowering, len(lengths)) as runtime:
        streams = [runtime.stream(prompt, decoding) for prompt in prompts]
        got = [[thread.tokens for thread in stream.completion().threads] for stream in streams]
        assert got == [[thread.tokens for thread in wide.generate(prompt, decoding).threads] for prompt in prompts]
        assert isinstance(runtime.engine, HashEngine)
        assert max(runtime.engine.widths) <= STEP_ROWS


@pytest.mark.parametrize("length", range(STEP_ROWS - 6, STEP_ROWS + 2))
def test_a_prompt_is_cut_no_earlier_for_its_draft(length: int) -> None:
    with narrow(Language(1), "scatter") as runtime:
        got = runtime.generate([1] * length, Decoding(max_tokens=1, mask_slots=5))
        assert got.statistics.steps == 1
        assert isinstance(runtime.engine, HashEngine)
        assert len(runtime.engine.widths) == (1 if length <= STEP_ROWS else 2)


def test_requests_of_the_acceptance_measurement_keep_to_it_too() -> None:
    with narrow(Language(1), "scatter") as runtime:
        answer = generate_answer(runtime, [1] * STEP_ROWS, 1, 5)
        assert answer.statistics.steps == 1
        assert isinstance(runtime.engine, HashEngine)
        assert runtime.engine.widths == [STEP_ROWS]
