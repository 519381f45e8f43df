"""Verdict: what a step's logits make of its plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.plan import Part
from spaceport.runtime.sampling import Choose


@dataclass(frozen=True)
class Verdict:
    """What is kept of one thread's rows, and what it writes."""

    kept: tuple[int, ...]  # rows of the part whose slots the thread holds from now on
    tokens: tuple[int, ...]  # the accepted candidates, then the network's own next token
    candidates: tuple[int, ...]  # what the mask slots say comes after those

    @property
    def accepted(self) -> int:
        """How many candidates were accepted."""
        return max(0, len(self.tokens) - 1)


def accept(part: Part, logits: NDArray[np.float32], choose: Choose) -> Verdict:
    """Walk the draft along the tokens that the network itself chooses: the text is what it would be with no draft.

    `logits` holds one line for each wanted row of the part.
    """
    layout, known = part.layout, part.layout.known
    if not part.complete:
        return Verdict(tuple(range(known)), (), ())
    path, first = part.thread.path, known - 1

    def choice(row: int) -> int:
        return choose(logits[row - first], path, int(part.positions[row]) + 1)

    node, kept = 0, list(range(known))
    tokens = [choice(first)]
    while (follower := _child(part, node, tokens[-1])) is not None:
        node = follower
        kept.append(layout.nodes[node])
        tokens.append(choice(layout.nodes[node]))
    candidates = tuple(choice(row) for row in layout.groups[node])
    return Verdict(tuple(kept), tuple(tokens), candidates)


def _child(part: Part, node: int, token: int) -> int | None:
    """The candidate behind a node that stands for this token."""
    for index, (parent, candidate) in enumerate(zip(part.draft.parents, part.draft.tokens, strict=True)):
        if parent == node and candidate == token:
            return index + 1
    return None
