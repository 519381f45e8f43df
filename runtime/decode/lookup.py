"""Prompt lookup: n-gram candidates from the prompt and the text so far."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST, _SHORTEST = 4, 2  # matching tokens; a single token predicts too little


class Lookup:
    """The last position of each n-gram of a thread; what followed it there is proposed to follow it again."""

    def __init__(self) -> None:
        self._positions: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last occurrence
        self._known = 0  # tokens of the thread that are indexed

    def copy(self) -> Lookup:
        """A copy for a thread that continues differently from here."""
        other = Lookup()
        other._positions = self._positions.copy()
        other._known = self._known
        return other

    def following(self, tokens: Sequence[int], most: int) -> tuple[Sequence[int], int]:
        """Up to `most` tokens that followed the last n-gram before, and the length of that n-gram; (), 0 without a match.

        Since the last call, tokens may only have been appended.
        """
        end, positions = len(tokens), self._positions
        for position in range(max(_SHORTEST, self._known), end):
            longest = tuple(tokens[max(0, position - _LONGEST) : position])
            for length in range(_SHORTEST, len(longest) + 1):
                positions[longest[-length:]] = position
        self._known = max(self._known, end)
        longest = tuple(tokens[-_LONGEST:])
        for length in range(len(longest), _SHORTEST - 1, -1):
            position = positions.get(longest[-length:], end)
            if position < end:
                return tokens[position : position + most], length
        return (), 0
