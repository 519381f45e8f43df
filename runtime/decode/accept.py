"""Verdict: what a step's logits make of its plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.plan import Part
from spaceport.runtime.decode.selector import NotANumber, TokenSelector


class Verdict(NamedTuple):
    """What is kept of one thread's rows, and what it writes."""

    retained: tuple[int, ...]  # rows of the part whose KV slots are retained
    tokens: tuple[int, ...]  # the accepted candidates, then the network's own next token
    candidates: tuple[Candidates, ...]  # what the mask slots say comes after those

    @property
    def accepted(self) -> int:
        """How many candidates were accepted."""
        return max(0, len(self.tokens) - 1)


def accept(part: Part, logits: NDArray[np.float32], selector: TokenSelector, most: int = 1) -> Verdict:
    """Walk the draft along the tokens that the network itself chooses: the text is what it would be with no draft.

    `logits` holds one line for each wanted row of the part; `most` is how many tokens of each mask slot are of use.
    """
    layout, thread = part.layout, part.thread
    known = layout.known
    if not part.complete:
        return Verdict(tuple(range(known)), (), ())
    first = part.first_wanted
    node, kept = 0, list(range(known))
    tokens = [selector.token(logits[known - 1 - first], thread, ())]
    while (follower := _child(part, node, tokens[-1])) is not None:
        row = layout.nodes[follower]
        try:
            following = selector.token(logits[row - first], thread, tokens)
        except (NotANumber, OptionFault):
            break  # the text may end before it comes to that; if it does not, the next step does
        node = follower
        kept.append(row)
        tokens.append(following)
    candidates: tuple[Candidates, ...] = ()
    if group := layout.groups[node]:
        lines = logits[group[0] - first : group[-1] + 1 - first]
        candidates = selector.candidates(lines, thread, len(thread.tokens) + len(tokens), most)
    return Verdict(tuple(kept), tuple(tokens), candidates)


def _child(part: Part, node: int, token: int) -> int | None:
    """The candidate behind a node that stands for this token."""
    parents, tokens = part.draft.parents, part.draft.tokens
    for index in range(node, len(tokens)):  # a candidate comes behind its node
        if parents[index] == node and tokens[index] == token:
            return index + 1
    return None
