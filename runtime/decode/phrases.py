"""Phrases as a draft source: what mostly followed the last tokens in texts that were counted before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from spaceport.graphs.contract.phrases import CHANCES, LONGEST, PhraseTable, extended
from spaceport.runtime.decode.draft import MOST_LIKELY, Ranked, common

Rates = tuple[list[float], list[float]]  # the average probability that was given, and how often the token was accepted


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


class PhraseProposal:
    """What phrases propose behind the last tokens of a thread, and behind any draft token."""

    source = "phrase"
    copying = False
    anywhere = True

    def __init__(self, phrases: Phrases, tokens: Sequence[int], depths: int, rates: Rates, trust: float) -> None:
        """Behind the last of these tokens; `trust` is the factor that corrects the probabilities of phrases."""
        self._phrases, self._tokens, self.depths = phrases, tuple(tokens[-LONGEST:]), depths
        self._rates, self._trust = rates, trust

    def behind(self, depth: int, path: Sequence[int]) -> Ranked:
        found = self._phrases.following((*self._tokens, *path[1:]))
        return () if found is None else ((min(MOST_LIKELY, found[0] * self._trust), found[1]),)

    @cached_property
    def _chain(self) -> list[tuple[float, int]]:
        tokens, chain = list(self._tokens), list[tuple[float, int]]()
        while len(chain) < self.depths and (found := self._phrases.following(tokens)):
            chain.append(found)
            tokens.append(found[1])
        return chain

    def best(self) -> Sequence[int]:
        return [token for _, token in self._chain]

    def learn(self, written: Sequence[int], weight: float) -> int:
        right, (promised, accepted) = common(self.best(), written), self._rates
        for depth in range(min(right + 1, len(self._chain), len(written))):
            promised[0] += weight * (self._chain[depth][0] - promised[0])
            accepted[0] += weight * ((depth < right) - accepted[0])
        return right
