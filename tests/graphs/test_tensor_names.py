"""Tensor names: missing names come before unknown ones, and the first one is named."""

from __future__ import annotations

import pytest

from spaceport.graphs.tensor_names import different_names


@pytest.mark.parametrize(
    ("found", "expected", "difference"),
    [
        ({"a", "b"}, {"b", "a"}, None),
        ({"a"}, {"a", "b"}, "has no tensor b"),
        (set(), {"c", "a", "b"}, "has no tensor a and 2 more"),
        ({"a", "z", "y"}, {"a"}, "has the unknown tensor y and 1 more"),
        ({"z"}, {"a"}, "has no tensor a"),
    ],
)
def test_names_that_differ_are_described(found: set[str], expected: set[str], difference: str | None) -> None:
    assert different_names(found, expected) == difference
