"""Comparison: the first token, ending or thread in which two completions differ."""

from __future__ import annotations

import pytest

from spaceport.runtime.comparison import ThreadTokens, token_differences
from spaceport.runtime.decode.sequence import Ending


def thread(tokens: list[int], *path: int, start: int = 2, ending: Ending = "end") -> ThreadTokens:
    return ThreadTokens(path, tuple(tokens), start, ending)


ROOT = thread([1, 2, 3, 4, 5])
CHILD = thread([1, 2, 3, 9, 7, 8], 0, start=4)


@pytest.mark.parametrize(
    ("found", "expected", "first"),
    [
        ([ROOT, CHILD], [ROOT, CHILD], None),
        ([thread([1, 2, 3, 6, 5]), CHILD], [ROOT, CHILD], ((), 3)),
        ([thread([1, 2, 3, 4, 5], ending="length")], [ROOT], ((), 5)),
        ([ROOT, thread([1, 2, 3, 9, 7, 7], 0, start=4)], [ROOT, CHILD], ((0,), 5)),
        ([ROOT], [ROOT, CHILD], ((0,), 4)),
        ([thread([1, 2, 3, 4, 5], ending="stop")], [ROOT], ((), 5)),
        ([ROOT, thread([1, 2, 3, 9, 7, 8], 0, start=5)], [ROOT, CHILD], ((0,), 4)),
        # The length of a cut thread is not compared; its tokens are.
        ([thread([1, 2, 3], ending="total")], [ROOT, CHILD], None),
        ([thread([1, 2, 9], ending="total")], [ROOT, CHILD], ((), 2)),
    ],
)
def test_a_difference_is_the_first_differing_token_of_the_first_differing_thread(
    found: list[ThreadTokens], expected: list[ThreadTokens], first: tuple[tuple[int, ...], int] | None
) -> None:
    by_path = [{each.path: each for each in threads} for threads in (found, expected)]
    differences = [(one.path, one.position) for one in token_differences(*by_path).values()]
    assert differences[:1] == ([] if first is None else [first])
