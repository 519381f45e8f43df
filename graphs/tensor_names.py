"""Tensor names: how the tensors that are found differ from those that a model has."""

from __future__ import annotations

from collections.abc import Set


def different_names(found: Set[str], expected: Set[str]) -> str | None:
    """The difference in words, such as "has no tensor a.weight and 2 more"; None: the names are the same."""
    for wrong, names in (("has no", expected - found), ("has the unknown", found - expected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            return f"{wrong} tensor {min(names)}{more}"
    return None
