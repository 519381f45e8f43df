"""Phrases: the tokens that mostly followed a few others in texts that were counted beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from spaceport.graphs.contract.phrases import CHANCES, LONGEST, PhraseTable, extended


class Phrases:
    """The most probable token behind each known context."""

    def __init__(self, table: PhraseTable) -> None:
        chances = (table.chances / CHANCES).tolist()
        self._following = dict(
            zip(table.contexts.tolist(), zip(chances, table.tokens.tolist(), strict=True), strict=True)
        )

    def following(self, tokens: Sequence[int]) -> tuple[float, int] | None:
        """The probability and the token behind the longest known context; None: no context is known."""
        found, context, known = None, 0, self._following
        for token in tokens[: -LONGEST - 1 : -1]:
            context = extended(context, token)
            found = known.get(context, found)
        return found
