"""Lookup: what followed the longest run of last words where it stood last, as reading the whole text finds it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.runtime.decode.lookup import Lookup
from spaceport.runtime.decode.threads import new_thread

LONGEST, SHORTEST = 4, 2
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)  # few words, so that they come again


def read_through(tokens: Sequence[int], most: int) -> tuple[list[int], int]:
    """The same, with no memory."""
    end = len(tokens)
    for words in range(LONGEST, SHORTEST - 1, -1):
        for position in range(end - 1, words - 1, -1):
            if words <= end and tokens[position - words : position] == tokens[end - words :]:
                return list(tokens[position : position + most]), words
    return [], 0


@given(text=TEXTS, own=TEXTS, other=TEXTS, asked=st.sets(st.integers(1, 40)), most=st.integers(1, 6))
def test_a_thread_that_grows_and_forks_looks_up_its_own_text_as_if_it_were_read_through(
    text: list[int], own: list[int], other: list[int], asked: set[int], most: int
) -> None:
    parent = new_thread(text[:1], 4, lookup=True)
    for token in text[1:]:
        parent.tokens.append(token)
        if len(parent.tokens) in asked:
            assert parent.lookup is not None
            found, words = parent.lookup.following(parent.tokens, most)
            assert (list(found), words) == read_through(parent.tokens, most)
    child = parent.child(len(text) - 1, 9, np.empty(0, np.int64))
    for token, its_token in zip(own, other, strict=False):
        for thread, following in ((parent, token), (child, its_token)):
            thread.tokens.append(following)
            assert thread.lookup is not None
            assert list(thread.lookup.following(thread.tokens, 3)[0]) == read_through(thread.tokens, 3)[0]


@pytest.mark.parametrize(
    ("text", "following"),
    [
        ([], []),
        ([1, 2], []),
        ([1, 1], []),  # a single word is not enough
        ([1, 1, 1], [1]),  # the words may overlap
        ([1, 2, 7, 1, 2], [7, 1, 2]),
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # the last occurrence
        ([3, 1, 2, 7, 4, 1, 2, 8, 3, 1, 2], [7, 4, 1]),  # more words are better than a later occurrence
        ([9, 3, 1, 2, 7, 3, 1, 2, 8, 9, 3, 1, 2], [7, 3, 1]),
        ([5, 9, 3, 1, 2, 7, 6, 9, 3, 1, 2, 8, 5, 9, 3, 1, 2], [8, 5, 9]),  # a fifth word makes no difference
    ],
)
def test_what_is_proposed_stood_behind_the_same_words(text: list[int], following: list[int]) -> None:
    assert list(Lookup().following(text, 3)[0]) == following


def test_a_thread_that_looks_nothing_up_has_nothing_to_look_up_in() -> None:
    parent = new_thread([1, 2], 4)
    assert parent.lookup is None
    assert parent.child(1, 9, np.empty(0, np.int64)).lookup is None
