"""A native bundle with a damaged graph, weights or signature is refused or answers; no damage ends the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from attack.mutations import damaged_bundles
from attack.outcome import Budget
from spaceport.kernels.native_library import library_path

pytestmark = [pytest.mark.slow, pytest.mark.skipif(library_path() is None, reason="no C++ compiler")]


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("tiny_int8_bundle", 100),
        *(pytest.param(f"{name}_int8_bundle", 2500, marks=pytest.mark.nightly) for name in ("tiny", "demo")),
    ],
)
def test_no_damage_of_a_native_bundle_ends_the_process(
    name: str, cases: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    outcome = damaged_bundles(request.getfixturevalue(name), tmp_path, 1, Budget(3600.0, cases))
    assert outcome.failures == []
    assert outcome.cases == cases
    assert {"refused BundleError", "same output", "other output"} <= set(outcome.counts)
