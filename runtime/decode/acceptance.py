"""Acceptance: how often the draft tokens of each source are accepted, and which ones of a step are.

Every generated token shows whether each source had predicted it, also if it was not drafted. Only mask slots have to be
fed to be measured.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.draft_methods import MAX_DEPTHS, DraftAcceptance
from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.plan import Part
from spaceport.runtime.decode.sequence import NotANumber, TokenSelector

_NEW, _PRIOR = 0.1, 4  # minimum weight of a step in an average; steps that the initial values count for
_HOPE = 0.5  # how far rates of mask slots start back towards their initial values in a new request
_RETRY = 0.003  # share per step by which rates of unused mask slots return to their initial values, to be tried again
_LEAST_TRUST, _MOST_TRUST = 0.1, 1.5
# Initial rates where a bundle has none: of mask slots; of prompt lookup after 2, 3 or 4 matching tokens, and after few or
# many accepted tokens in a row.
_MASKS = tuple(0.7 * 0.85**depth for depth in range(MAX_DEPTHS))
USUAL_LOOKUP = (0.3, 0.45, 0.6, 0.85, 0.95)


class Acceptance:
    """Acceptance probabilities: moving averages over the steps of one request, or of all that share them."""

    def __init__(self, depths: int, measured: DraftAcceptance | None = None) -> None:
        """Start with the rates that a bundle brings, or with usual ones; `depths` is the number of mask slots or heads."""
        measured = measured or DraftAcceptance(())
        rates, lookup = measured.rates or _MASKS, measured.lookup or USUAL_LOOKUP
        self.initial = [*rates, *rates[-1:] * depths][:depths]
        # by depth: how often mask slots or heads added that many tokens to those of other sources; then: while text is
        # copied
        self.masks = list(self.initial), list(self.initial)
        self.lookup = list(lookup)  # by kind of match
        # by source and depth: probability that it gave to its best token, and how often that was accepted, behind an
        # accepted one
        self._promises: dict[str, tuple[list[float], list[float]]] = {}
        self.steps = 0

    def copy(self) -> Acceptance:
        """A copy that a new request starts with; another thread may change the original meanwhile.

        Mask slots start half way back to their initial rates: how well they predict differs between texts, and a trial
        costs little.
        """
        copy = Acceptance(len(self.initial))
        copy.initial = self.initial
        copy.follow(self, 1.0)
        for masks in copy.masks:
            masks[:] = [rate + _HOPE * max(0.0, first - rate) for rate, first in zip(masks, self.initial, strict=True)]
        return copy

    def follow(self, other: Acceptance, weight: float) -> None:
        """Move all averages towards those of another one."""
        pairs = [*zip(self.masks, other.masks, strict=True), (self.lookup, other.lookup)]
        for source, theirs in list(other._promises.items()):
            pairs += zip(self.promises(source, len(theirs[0])), theirs, strict=True)
        for own, averages in pairs:
            for index, average in enumerate(averages):
                own[index] += weight * (average - own[index])

    def reach(self, copying: bool) -> list[float]:
        """The probability that mask slots or heads add one token, two tokens, ... to those of other sources."""
        return list(accumulate(self.masks[copying], min))

    def promises(self, source: str, depths: int) -> tuple[list[float], list[float]]:
        """By depth: the probability that a source gave to its best token, and how often this was accepted."""
        averages = self._promises.get(source)
        if averages is None or len(averages[0]) < depths:
            promised, accepted = averages or ([], [])
            more = [*self.initial, *_MASKS[len(self.initial) :]][len(promised) : depths]
            averages = self._promises[source] = [*promised, *more], [*accepted, *more]
        return averages

    def trust(self, source: str, depths: int) -> list[float]:
        """By depth: factor that corrects the probabilities that a source gives."""
        pairs = zip(*self.promises(source, depths), strict=True)
        return [min(_MOST_TRUST, max(_LEAST_TRUST, accepted / max(promised, 1e-9))) for promised, accepted in pairs]

    def count_step(self) -> float:
        """Count a step that is learned from; returns its weight in the averages."""
        self.steps += 1
        return max(_NEW, 1 / (self.steps + _PRIOR))

    def learn_masks(self, added: int, candidates: int, written: int, copying: bool, weight: float) -> None:
        """Learn that mask slots added tokens to those of other sources; without candidates, forget slowly."""
        # Candidates beyond the generated tokens are unknown, unless one before them was wrong.
        known = written if added >= min(candidates, written) else candidates
        masks = self.masks[copying]
        for depth, first in enumerate(self.initial):
            if depth >= candidates:
                masks[depth] += _RETRY * (first - masks[depth])
            elif depth < known:
                masks[depth] += weight * ((depth < added) - masks[depth])


class Verdict(NamedTuple):
    """The result of a step for one thread: retained rows and generated tokens."""

    retained: tuple[int, ...]  # rows of the part whose KV slots are retained
    tokens: tuple[int, ...]  # the accepted candidates, then the model's own next token
    candidates: tuple[Candidates, ...]  # what the mask slots or heads predict after those, by position
    sources: tuple[str, ...] = ()  # of each accepted candidate, as in its draft

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
    layout, thread, draft = part.layout, part.thread, part.draft
    known = layout.known
    if not part.complete:
        return Verdict(tuple(range(known)), (), ())
    first = int(part.rows_wanted[0])
    node, retained, nodes = 0, list(range(known)), []
    tokens = [selector.token(logits[(known - 1 - first) * lines], thread, ())]
    for child, (parent, candidate) in enumerate(zip(draft.parents, draft.tokens, strict=True), 1):
        if parent != node or candidate != tokens[-1]:  # a candidate comes after its parent
            continue
        row = layout.nodes[child]
        try:
            following = selector.token(logits[(row - first) * lines], thread, tokens)
        except (NotANumber, OptionFault):
            break  # the completion may end before this position; if it does not, the next step raises the error
        node = child
        nodes.append(child)
        retained.append(row)
        tokens.append(following)
    sources = tuple([draft.sources[node - 1] for node in nodes]) if draft.sources else ()
    candidates: tuple[Candidates, ...] = ()
    if (proposed := _proposed(part, node, first, lines, heads)) is not None:
        candidates = selector.candidates(logits[proposed], thread, len(thread.tokens) + len(tokens), most)
    return Verdict(tuple(retained), tuple(tokens), candidates, sources)


def _proposed(part: Part, node: int, first: int, lines: int, heads: int) -> slice | None:
    """The lines with predictions for the tokens after that of a node's own line; None if there are none."""
    layout = part.layout
    if heads:  # head 1 predicts the token after that of the own line
        own = (layout.nodes[node] - first) * lines
        return slice(own + 1, own + 1 + heads)
    group = layout.groups[node]
    return slice((group[0] - first) * lines, (group[-1] + 1 - first) * lines, lines) if group else None
