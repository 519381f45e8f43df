"""Replay: synthetic texts with the acceptance rates of a table, on an engine that runs every call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch, Engine
from spaceport.runtime.selection import SelectedRows
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.decode.benchmark import benchmark
from spaceport.tools.bench.decode.options import DecodeOptions
from spaceport.tools.bench.decode.replay import (
    SyntheticTexts,
    implied_tokens_per_step,
    mask_depths,
    replay_runtime,
    synthetic_texts,
)
from spaceport.tools.bench.decode.summary import DecodeReport

pytestmark = pytest.mark.on_change()  # runs thousands of steps
VOCABULARY = np.arange(10, 500)


def replayed(bundle: Path, acceptance: tuple[float, ...], **more: object) -> DecodeReport:
    given = {"max_tokens": 96, "limit": 6, "rounds": 1, "context": 16, "threads": 1, **more}
    return benchmark(bundle, None, DecodeOptions(replay=acceptance, **given), lambda _: None)  # type: ignore[arg-type]


def test_no_pair_of_tokens_repeats_and_first_tokens_are_unique() -> None:
    texts = SyntheticTexts(VOCABULARY, (0.5,), count=40, length=1500, seed=0)
    for tokens in texts.tokens:
        pairs = list(zip(tokens.tolist(), tokens[1:].tolist(), strict=False))
        assert len(set(pairs)) == len(pairs)
    assert len(set(texts.tokens[:, 0].tolist())) == 40
    assert set(texts.tokens.flat) <= set(VOCABULARY.tolist())


def test_mask_slots_are_right_with_the_rates_of_the_table() -> None:
    table = (0.9, 0.5, 0.7)
    right = SyntheticTexts(VOCABULARY, table, count=20, length=2000, seed=1).right
    shares = [(right > depth).mean() for depth in range(3)]
    assert shares == pytest.approx([0.9, 0.45, 0.315], abs=0.01)
    assert (right == SyntheticTexts(VOCABULARY, table, count=20, length=2000, seed=1).right).all()
    assert (right != SyntheticTexts(VOCABULARY, table, count=20, length=2000, seed=2).right).any()


def test_depths_of_mask_rows_count_from_the_token_of_their_group_and_a_table_implies_tokens_per_step() -> None:
    masked = np.array([[0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 1, 1]], np.bool_)
    assert mask_depths(masked).tolist() == [[-1, 0, 1, -1, 0, -1], [-1, -1, -1, 0, 1, 2]]
    assert implied_tokens_per_step((0.79,) * 5) == pytest.approx(1 + sum(0.79**depth for depth in range(1, 6)))
    assert implied_tokens_per_step((0.5, 0.5)) == 1.75


@pytest.mark.slow
def test_chains_reach_the_tokens_per_step_that_the_table_implies(tiny_bundle: Path) -> None:
    acceptance = (0.79,) * 5
    report = replayed(tiny_bundle, acceptance, fixed=(1, 3, 5))
    found = {mode.mode: mode for mode in report.modes}
    assert list(found) == ["plain", "default", "fixed 1", "fixed 3", "fixed 5"]
    assert found["plain"].tokens_per_step == 1.0
    for slots in (1, 3, 5):
        chain = found[f"fixed {slots}"]
        # The first step has no candidates, and max_tokens cuts the last ones.
        assert chain.tokens_per_step == pytest.approx(implied_tokens_per_step(acceptance[:slots]), rel=0.09)
        rates = [rate.rate for rate in chain.by_depth]
        assert rates == pytest.approx([0.79**depth for depth in range(1, slots + 1)], abs=0.07)
        assert set(chain.by_source) == {"mask"}
    assert 1 <= found["default"].tokens_per_step < 3.7  # on a busy machine drafts of a tiny model may not pay
    assert report.identical
    assert sum(mode.compared for mode in report.modes) == 4 * 6 * 2
    assert found["default"].by_source.keys() <= {"mask"}  # prompt lookup finds nothing


def test_a_replay_is_repeatable_also_with_concurrent_requests(tiny_bundle: Path) -> None:
    given: dict[str, object] = {"modes": ("plain",), "fixed": (2,), "limit": 3, "max_tokens": 40}
    alone, again, concurrent = (
        replayed(tiny_bundle, (0.6, 0.3), requests=requests, **given).modes[1] for requests in (1, 1, 3)
    )
    assert alone.by_depth == again.by_depth == concurrent.by_depth
    assert replayed(tiny_bundle, (0.6, 0.3), seed=1, **given).modes[1].by_depth != alone.by_depth
    never = replayed(tiny_bundle, (0.0, 0.5), **given).modes[1]
    assert [rate.rate for rate in never.by_depth] == [0.0, 0.0]


def test_the_inner_engine_computes_every_row_whether_it_selects_tokens_or_not(tiny_bundle: Path) -> None:
    options = DecodeOptions(replay=(0.7, 0.7), limit=1, context=8, max_tokens=40)
    found = []
    with Runtime.open(tiny_bundle, threads=1, max_seq_len=64) as base:
        texts, (prompt,) = synthetic_texts(base, options, ())
        for selects in (False, True):
            engine = _Recording(base.engine, selects)
            runtime = replay_runtime(Runtime(base.bundle, engine, 64), texts, (0.7, 0.7), 1)
            decoding = Decoding(max_tokens=40, mask_slots=2, draft="chain")
            found.append(runtime.generate(list(prompt.tokens), decoding))
            assert (sum(engine.fed), engine.selected > 0) == (found[-1].statistics.rows, selects)
    assert found[0].tokens == found[1].tokens == tuple(texts.tokens[0, 8:48].tolist())
    assert found[0].statistics.accepted_by_depth == found[1].statistics.accepted_by_depth


class _Recording:
    """An engine that counts the rows of each call, and may claim to select tokens."""

    def __init__(self, engine: Engine, selects: bool) -> None:
        self._engine = engine
        self.selects = selects
        self.fed: list[int] = []
        self.selected = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, batch: Batch) -> Any:
        self.fed.append(batch.input_ids.size)
        return self._engine.run(batch)

    def select(self, batch: Batch) -> list[SelectedRows]:
        self.selected += 1
        self.run(batch)
        return []
