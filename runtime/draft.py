"""Draft: the candidates of a step as a tree, and how many masks stand behind each of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Draft:
    """Candidates for the tokens after the last known one; node 0 is that token, node 1 + i is candidate i."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # node before each candidate
    masks: tuple[int, ...] = (0,)  # mask slots behind each node


PLAIN = Draft()


def chain(candidates: Sequence[int], mask_slots: int, room: int) -> Draft:
    """SPACE's draft: one line of candidates, and the same number of mask slots behind every node.

    `room` is how many tokens the text may still grow by: what could only be written beyond it is not drafted.
    """
    tokens = tuple(candidates[: max(0, room - 1)])
    parents = tuple(range(len(tokens)))
    masks = tuple(max(0, min(mask_slots, room - 2 - depth)) for depth in range(len(tokens) + 1))
    return Draft(tokens, parents, masks)
