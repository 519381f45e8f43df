"""Merges: the merge list of a byte-pair encoding whose tokens are ranked, as the tokenizers library needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Token = TypeVar("Token", str, bytes)


def merges_of(ranks: Mapping[Token, float]) -> list[tuple[Token, Token]]:
    """All pairs of tokens that make a third one, the lowest rank first.

    The original algorithms merge the pair whose result has the lowest rank, and of equal results the leftmost one.
    A merge list ranks the pairs instead: two pairs that overlap and make equal tokens may be merged in another order.
    """
    found: list[tuple[float, int, Token, Token]] = []
    for token, rank in ranks.items():
        for end in range(1, len(token)):
            left, right = token[:end], token[end:]
            if left in ranks and right in ranks:
                found.append((rank, -end, left, right))
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]
