"""A slice of the campaign: none of its cases crashes, hangs, raises an untyped error or changes another's output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attack.__main__ import PARTS
from attack.outcome import Budget, Outcome
from support.paths import ROOT

_PROPERTY = re.compile(r"^\| (\d+) \| .+ \| `(tests/\S+\.py)`: `(test_\w+)` \|$", re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("part", PARTS)
def test_no_case_of_a_part_fails(part: str, tmp_path: Path) -> None:
    outcomes = PARTS[part](tmp_path, 1, Budget(20.0))
    for outcome in [outcomes] if isinstance(outcomes, Outcome) else outcomes:
        assert outcome.failures == []


def test_each_property_has_a_test_that_is_not_skipped() -> None:
    rows = _PROPERTY.findall(Path(__file__).with_name("README.md").read_text("utf-8"))
    assert [int(number) for number, _, _ in rows] == list(range(1, 16))
    for number, file, name in rows:
        before, found, _ = (ROOT / file).read_text("utf-8").partition(f"def {name}(")
        assert found, f"property {number}: {file} has no test {name}"
        assert "skip" not in before.rpartition("\n\n\n")[2], f"property {number}: skipped"
