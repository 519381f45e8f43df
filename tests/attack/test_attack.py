"""A slice of the campaign: none of its cases crashes, hangs, raises an untyped error or changes another's output."""

from __future__ import annotations

from pathlib import Path

import pytest

from attack.__main__ import PARTS
from attack.outcome import Budget


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("part", PARTS)
def test_no_case_of_a_part_fails(part: str, tmp_path: Path) -> None:
    for outcome in PARTS[part](tmp_path, 1, Budget(20.0)):
        assert outcome.failures == []
