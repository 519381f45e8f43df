"""Lookup: what followed the last words of a text where they stood before."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST, _SHORTEST = 4, 2  # words that have to be the same; a single one says too little about what follows it


class Lookup:
    """The last place of every few tokens in a row; what followed them there is proposed to follow them again."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}  # tokens -> place of what followed them
        self._known = 0  # tokens of the text that are in it

    def copy(self) -> Lookup:
        """The same for a text that goes on otherwise from here."""
        other = Lookup()
        other._places = self._places.copy()
        other._known = self._known
        return other

    def following(self, tokens: Sequence[int], most: int) -> tuple[Sequence[int], int]:
        """What followed the last tokens of a text before, and how many of these are equal; nothing if they are new.

        The text may only have grown since it was last asked about.
        """
        end = len(tokens)
        for position in range(max(1, self._known), end):
            for words in range(_SHORTEST, min(_LONGEST, position) + 1):
                self._places[tuple(tokens[position - words : position])] = position
        self._known = max(self._known, end)
        for words in range(min(_LONGEST, end), _SHORTEST - 1, -1):
            position = self._places.get(tuple(tokens[end - words :]), end)
            if position < end:
                return tokens[position : position + most], words
        return (), 0
