"""Drafter: where the draft of a thread comes from; a new source of draft tokens is one more of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from spaceport.runtime.decode.accept import Verdict
from spaceport.runtime.decode.draft import Draft, Drafting, Rates, chain, tree
from spaceport.runtime.decode.plan import Part
from spaceport.runtime.decode.threads import Thread


class Drafter(Protocol):
    """Proposes the draft of each thread of a request, and learns from what was accepted."""

    def draft(self, thread: Thread, remaining: int, rows: int) -> Draft:
        """A draft for a thread that may write `remaining` more tokens, of at most `rows` rows with its last token.

        Also called while a prompt is fed in chunks; such a draft is not used unless the chunk is the last one.
        """

    def learn(self, part: Part, verdict: Verdict) -> None:
        """Note which draft tokens of a step were accepted.

        `part.draft` is the draft that was fed, an empty one for a chunk of a prompt; `part.thread` still has the guesses
        of the step before, of which the draft was made.
        """


class ChainDrafter:
    """SPACE's draft: one chain of candidates, and the same number of mask slots behind each."""

    def __init__(self, drafting: Drafting) -> None:
        self._mask_slots = drafting.mask_slots

    def draft(self, thread: Thread, remaining: int, rows: int) -> Draft:
        rows = min(rows, (self._mask_slots + 1) ** 2)
        return chain([guess.tokens[0] for guess in thread.guesses], self._mask_slots, remaining, rows)

    def learn(self, part: Part, verdict: Verdict) -> None:
        """A chain has one shape, whatever was accepted."""


class TreeDrafter:
    """The tree of mask-slot predictions and prompt lookup that promises the most tokens for its rows."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self._rates = Rates()

    def draft(self, thread: Thread, remaining: int, rows: int) -> Draft:
        looked_up: Sequence[int] = ()
        if thread.lookup is not None:
            looked_up = thread.lookup.following(thread.tokens, self._drafting.lookup)
        rows = min(rows, self._drafting.rows)
        return tree(thread.guesses, looked_up, self._drafting, remaining, rows, self._rates)

    def learn(self, part: Part, verdict: Verdict) -> None:
        accepted = [part.layout.nodes.index(row) for row in verdict.kept[part.layout.known :]]
        self._rates.heard(part.draft, len(part.thread.guesses), accepted)


def drafter_for(drafting: Drafting) -> Drafter:
    """The drafter of one request."""
    return ChainDrafter(drafting) if drafting.shape == "chain" else TreeDrafter(drafting)
