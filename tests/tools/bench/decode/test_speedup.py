"""Speedup: the geometric mean over prompts, its extremes and its interval."""

from __future__ import annotations

import pytest

from spaceport.tools.bench.decode.speedup import speedup_of


def test_the_speedup_is_the_geometric_mean_of_the_medians_of_prompts() -> None:
    found = speedup_of({3: [2.0, 2.0, 9.0], 5: [0.5, 0.1, 0.7], 9: [4.0, 4.1, 3.9]}, 0)
    assert found is not None
    assert found.mean == pytest.approx((2.0 * 0.5 * 4.0) ** (1 / 3))
    assert (found.worst, found.worst_line) == (pytest.approx(0.5), 5)
    assert (found.best, found.best_line) == (pytest.approx(4.0), 9)
    assert found.prompts == 3
    assert found.low < found.mean < found.high


def test_the_interval_is_that_of_resampled_prompts_and_rounds() -> None:
    exact = speedup_of({1: [1.5, 1.5], 2: [1.5, 1.5]}, 0)
    assert exact is not None
    assert (exact.low, exact.high) == pytest.approx((1.5, 1.5))
    two = speedup_of({1: [1.0], 2: [4.0]}, 0)  # resamples have both, or one of them twice: 1, 2 or 4
    assert two is not None
    assert (two.low, two.high) == pytest.approx((1.0, 4.0))
    alone = speedup_of({1: [1.0, 2.0, 4.0]}, 0)  # one prompt: only its rounds vary
    assert alone is not None
    assert (alone.low, alone.mean, alone.high) == pytest.approx((1.0, 2.0, 4.0))
    many = speedup_of({line: [2.0 if line % 2 else 1.0] for line in range(400)}, 0)  # 2^(1/2 ± 1.96 · 0.025)
    assert many is not None
    assert (many.low, many.high) == pytest.approx((1.367, 1.463), abs=0.006)


def test_the_interval_depends_on_the_seed_only_and_no_prompts_have_no_speedup() -> None:
    ratios = {line: [1.0 + line / 7, 1.1, 0.9] for line in range(9)}
    assert speedup_of(ratios, 4) == speedup_of(ratios, 4) != speedup_of(ratios, 5)
    assert speedup_of({}, 0) is None
