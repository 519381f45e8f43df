"""Statistics: rows by what they hold, draft tokens step by step, and the rows that calls compute for nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.runtime.decode import statistics as module
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch
from spaceport.runtime.scheduling.generation import Completion
from spaceport.runtime.session import Runtime
from support.hash_engine import HashEngine, Language
from support.hash_runtime import hash_runtime

PROMPT = [1, 2, 3, 4, 5]


@dataclass
class CellEngine(HashEngine):
    """A fake engine that counts the rows that it computes."""

    computed: int = 0

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.computed += batch.input_ids.size
        return super().run(batch)


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


def test_chains_have_the_rows_of_the_paper() -> None:
    with hash_runtime(Language(1, end_every=10**9)) as runtime:
        given = Decoding(max_tokens=13, draft="chain", mask_slots=2, fork=False, ignore_eos=True)
        found = runtime.generate(PROMPT, given).statistics
    # A group of 2 masks behind the prompt, then 2 candidates and 3 groups in each step; the last step needs one mask.
    assert (found.steps, found.drafted_by_step) == (5, [0, 2, 2, 2, 2])
    assert found.accepted_by_step == [0, 2, 2, 2, 2]
    assert (found.candidate_rows, found.mask_rows) == (8, 2 + 3 * 6 + 1)


def test_all_rows_that_calls_compute_are_counted() -> None:
    async def run(runtime: Runtime) -> list[Completion]:
        lengths = [(3, 0), (40, 5), (11, 2), (25, 0), (2, 3), (7, 5)]  # tokens of the prompt, mask slots
        streams = [
            runtime.astream([1 + index % 7] * tokens, Decoding(max_tokens=5 + 4 * index, fork=False, mask_slots=slots))
            for index, (tokens, slots) in enumerate(lengths)
        ]
        return [await stream.completion() for stream in streams]

    for seed in range(4):
        plain = hash_runtime(Language(seed, quality=50, end_every=30), requests=3)
        engine = CellEngine(Language(seed, quality=50, end_every=30), plain.engine.capacity, 3)
        with Runtime(plain.bundle, engine, 64) as runtime:
            found = [one.statistics for one in asyncio.run(run(runtime))]
        assert sum(one.rows + one.padding_rows for one in found) == engine.computed
        assert sum(one.padding_rows for one in found) > 0


def test_only_the_first_steps_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_STEPS", 4)
    with hash_runtime(Language(1, end_every=10**9)) as runtime:
        found = runtime.generate(PROMPT, Decoding(max_tokens=40, mask_slots=0, ignore_eos=True, fork=False)).statistics
    assert (found.steps, found.drafted_by_step, found.accepted_by_step) == (40, [0] * 4, [0] * 4)
