"""Phrases: the tokens that mostly followed a few others in texts that were counted beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from spaceport.graphs.contract.phrases import CHANCES, PhraseTable, context_numbers


class Phrases:
    """The most probable token behind each known context."""

    def __init__(self, table: PhraseTable) -> None:
        chances = (table.chances / CHANCES).tolist()
        self._following: dict[int, tuple[float, int]] = dict(
            zip(table.contexts.tolist(), zip(chances, table.tokens.tolist(), strict=True), strict=True)
        )

    def following(self, tokens: Sequence[int]) -> tuple[float, int] | None:
        """The probability and the token behind the longest known context; None: no context is known."""
        known = self._following
        for context in reversed(context_numbers(tokens)):
            if (found := known.get(context)) is not None:
                return found
        return None
