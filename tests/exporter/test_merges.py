"""Merges: all pairs of tokens that make a third one, ordered by its rank."""

from spaceport.exporter.merges import merges_of


def test_every_pair_that_makes_a_token_is_merged_in_the_order_of_ranks() -> None:
    ranks = {"a": 9, "b": 8, "ab": 2, "ba": 1, "aba": 3, "xy": 0}
    assert merges_of(ranks) == [("b", "a"), ("a", "b"), ("ab", "a"), ("a", "ba")]


def test_bytes_are_merged_alike() -> None:
    assert merges_of({b"a": 0, b"b": 1, b"ab": 2}) == [(b"a", b"b")]
