"""Draft names: the words for what drafts."""

from __future__ import annotations

import pytest

from spaceport.tools.verify.draft_names import named_drafts


@pytest.mark.parametrize(
    ("count", "predictor", "expected"),
    [(0, "mask slot", "prompt lookup"), (1, "head", "1 head"), (3, "mask slot", "3 mask slots")],
)
def test_a_number_of_predictors_has_words(count: int, predictor: str, expected: str) -> None:
    assert named_drafts(count, predictor) == expected
