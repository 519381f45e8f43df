"""Verification: which draft tokens of a step are accepted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.draft import Candidates, Source
from spaceport.runtime.decode.plan import Part
from spaceport.runtime.decode.selector import NotANumber, TokenSelector


class Verdict(NamedTuple):
    """The result of a step for one thread: retained rows and generated tokens."""

    retained: tuple[int, ...]  # rows of the part whose KV slots are retained
    tokens: tuple[int, ...]  # the accepted candidates, then the model's own next token
    candidates: tuple[Candidates, ...]  # what the mask slots or heads predict after those, by position

    @property
    def accepted(self) -> int:
        """Number of accepted candidates."""
        return max(0, len(self.tokens) - 1)


def accept(
    part: Part, logits: NDArray[np.float32], selector: TokenSelector, most: int = 1, lines: int = 1, heads: int = 0
) -> Verdict:
    """The verdict on a thread's rows: walks the draft along the tokens that the model itself selects.

    The generated tokens are therefore those of plain decoding.

    `logits` has `lines` lines for each wanted row of the part: its own, then those of the heads, of which the first
    `heads` are used. `most` is the number of candidates to take from each mask slot or head.
    """
    layout, thread = part.layout, part.thread
    known = layout.known
    if not part.complete:
        return Verdict(tuple(range(known)), (), ())
    first = part.first_wanted
    node, retained = 0, list(range(known))
    tokens = [selector.token(logits[(known - 1 - first) * lines], thread, ())]
    while (follower := _child(part, node, tokens[-1])) is not None:
        row = layout.nodes[follower]
        try:
            following = selector.token(logits[(row - first) * lines], thread, tokens)
        except (NotANumber, OptionFault):
            break  # the completion may end before this position; if it does not, the next step raises the error
        node = follower
        retained.append(row)
        tokens.append(following)
    candidates: tuple[Candidates, ...] = ()
    if (proposed := _proposed(part, node, lines, heads)) is not None:
        candidates = selector.candidates(logits[proposed], thread, len(thread.tokens) + len(tokens), most)
    return Verdict(tuple(retained), tuple(tokens), candidates)


def sources_of(part: Part, verdict: Verdict) -> list[Source]:
    """What proposed each accepted candidate of a verdict; empty for a draft without sources."""
    sources, layout = part.draft.sources, part.layout
    if not sources:
        return []
    accepted = verdict.retained[layout.known : layout.known + verdict.accepted]
    return [sources[layout.nodes.index(row) - 1] for row in accepted]


def _proposed(part: Part, node: int, lines: int, heads: int) -> slice | None:
    """The lines with predictions for the tokens after that of a node's own line; None if there are none."""
    layout, first = part.layout, part.first_wanted
    if heads:  # head 1 predicts the token after that of the own line
        own = (layout.nodes[node] - first) * lines
        return slice(own + 1, own + 1 + heads)
    group = layout.groups[node]
    return slice((group[0] - first) * lines, (group[-1] + 1 - first) * lines, lines) if group else None


def _child(part: Part, node: int, token: int) -> int | None:
    """The node of the candidate with this token behind a node."""
    parents, tokens = part.draft.parents, part.draft.tokens
    for index in range(node, len(tokens)):  # a candidate comes after its parent
        if parents[index] == node and tokens[index] == token:
            return index + 1
    return None
