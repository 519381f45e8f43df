"""Draft sources: what proposes draft tokens, and how often those of mask slots, prompt lookup and phrases are accepted.

Every generated token shows whether each source had predicted it, also if it was not drafted. Only mask slots have to be
fed to be measured.

Another source is a function here or elsewhere, and one entry of `SOURCES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Protocol

from spaceport.graphs.contract.draft_methods import MAX_DEPTHS, DraftAcceptance, lookup_kind
from spaceport.graphs.contract.phrases import LONGEST
from spaceport.runtime.decode.draft import MOST_LIKELY, Candidates, DraftConfig, Phrases, Proposal, Ranked, common
from spaceport.runtime.decode.sequence import TokenSequence

_LONGEST, _SHORTEST = 4, 2  # matching tokens; a single token predicts too little
_NAMES = {"mask": "mask slots", "head": "heads", "lookup": "prompt lookup", "phrase": "phrases"}  # as users read them
_NEW, _PRIOR = 0.1, 4  # minimum weight of a step in an average; steps that the initial values count for
# Share per step by which rates of unused mask slots return to their initial values: without it, a request that stopped
# feeding them would never feed them again.
_RETRY = 0.003
# Initial rates where a bundle has none: of mask slots; of prompt lookup after 2, 3 or 4 matching tokens, and after few or
# many accepted tokens in a row.
_MASKS = tuple(0.7 * 0.85**depth for depth in range(MAX_DEPTHS))
USUAL_LOOKUP = (0.3, 0.45, 0.6, 0.85, 0.95)


class Acceptance:
    """Acceptance rates of one request: moving averages over its steps that start with the rates of its bundle."""

    def __init__(self, mask_slots: int, measured: DraftAcceptance | None = None) -> None:
        """Start with the rates that a bundle brings, or with usual ones."""
        measured = measured or DraftAcceptance(())
        rates = measured.rates or _MASKS
        self.masks = [*rates, *rates[-1:] * mask_slots][:mask_slots]  # how often one, two, ... predict right
        self.lookup = list(measured.lookup or USUAL_LOOKUP)  # by kind of match
        # Mean probability that the table of phrases gave to its tokens, and how often these were right: it was counted in
        # other texts. The probabilities of mask slots and heads are the model's own, and are not corrected.
        self.phrases = [0.5, 0.5]
        self._initial, self._steps = tuple(self.masks), 0

    def count_step(self) -> float:
        """Count a step that is learned from; returns its weight in the averages."""
        self._steps += 1
        return max(_NEW, 1 / (self._steps + _PRIOR))

    def learn_masks(self, right: int, candidates: int, written: int, weight: float) -> None:
        """Learn how many candidates of mask slots were right; rates without candidates return to their initial values."""
        # Candidates beyond the generated tokens are unknown, unless one before them was wrong.
        known = written if right >= min(candidates, written) else candidates
        lowest = 1.0
        for depth, (rate, first) in enumerate(zip(self.masks, self._initial, strict=True)):
            if depth >= candidates:
                rate += _RETRY * (first - rate)
            elif depth < known:
                rate += weight * ((depth < right) - rate)
            self.masks[depth] = lowest = min(lowest, rate)


class LearningProposal(Proposal, Protocol):
    """A proposal that the tokens of its step show to be right or wrong, whether it was drafted or not."""

    def best(self) -> Sequence[int]:
        """Its best token for each position, the best one before it being accepted."""

    def learn(self, written: Sequence[int], weight: float) -> None:
        """Learn from the tokens that the step generated, with this weight."""


# Proposes draft tokens behind the last token of a thread of one request, by what is known of acceptance; of no depth if
# it has nothing to propose.
DraftSource = Callable[[TokenSequence, Acceptance], LearningProposal]


class Predictions:
    """Candidates by position, with the probabilities that the model gives them."""

    anywhere = False

    def __init__(self, source: str, candidates: Sequence[Candidates], last: int) -> None:
        """Candidates behind the token `last`."""
        self._candidates, self._last = candidates[:MAX_DEPTHS], last
        self.source, self.depths = source, len(self._candidates)

    def behind(self, depth: int, path: Sequence[int]) -> Ranked:
        candidates = self._candidates[depth].behind(path[-1])
        ranked = zip(candidates.probabilities, candidates.tokens, strict=True)
        return [(min(MOST_LIKELY, probability), token) for probability, token in ranked]

    def best(self) -> Sequence[int]:
        tokens: list[int] = []
        for candidates in self._candidates:
            behind = candidates.behind(tokens[-1] if tokens else self._last).tokens
            if not behind:
                break
            tokens.append(behind[0])
        return tokens

    def learn(self, written: Sequence[int], weight: float) -> None:
        """The probabilities are the model's own: nothing is learned."""


class MaskPredictions(Predictions):
    """Candidates of mask slots; how many of them are right is how many mask slots the next steps need."""

    def __init__(self, candidates: Sequence[Candidates], last: int, acceptance: Acceptance) -> None:
        super().__init__("mask", candidates, last)
        self._acceptance = acceptance

    def learn(self, written: Sequence[int], weight: float) -> None:
        self._acceptance.learn_masks(common(self.best(), written), self.depths, len(written), weight)


def mask_slots(thread: TokenSequence, acceptance: Acceptance) -> MaskPredictions:
    """What the mask slots predicted in the step before."""
    return MaskPredictions(thread.candidates, thread.tokens[-1], acceptance)


def heads(thread: TokenSequence, acceptance: Acceptance) -> Predictions:
    """What the heads predicted in the step before."""
    return Predictions("head", thread.candidates, thread.tokens[-1])


class Lookup:
    """The last position of each n-gram of a thread; what followed it there is proposed to follow it again."""

    def __init__(self) -> None:
        self._positions: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last occurrence
        self._known = 0  # tokens of the thread that are indexed
        self.copied, self.copied_until = 0, 0  # right tokens of this lookup in a row, and the length of the text then

    def copy(self) -> Lookup:
        """A copy for a thread that continues differently from here."""
        other = Lookup()
        other._positions = self._positions.copy()
        other._known = self._known
        return other

    def following(self, tokens: Sequence[int], most: int) -> tuple[Sequence[int], int]:
        """Up to `most` tokens that followed the last n-gram before, and the length of that n-gram; (), 0 without a match.

        Since the last call, tokens may only have been appended.
        """
        end, positions = len(tokens), self._positions
        for position in range(max(_SHORTEST, self._known), end):
            longest = tuple(tokens[max(0, position - _LONGEST) : position])
            for length in range(_SHORTEST, len(longest) + 1):
                positions[longest[-length:]] = position
        self._known = max(self._known, end)
        longest = tuple(tokens[-_LONGEST:])
        for length in range(len(longest), _SHORTEST - 1, -1):
            position = positions.get(longest[-length:], end)
            if position < end:
                return tokens[position : position + most], length
        return (), 0


class Continuation:
    """The tokens behind an earlier occurrence of the last tokens; their rates depend on the match, not on the depth."""

    source, anywhere = "lookup", False

    def __init__(self, tokens: Sequence[int], equal: int, lookup: Lookup, end: int, acceptance: Acceptance) -> None:
        """Tokens behind the `end` of the text, of which the last `equal` tokens match those before an earlier occurrence."""
        self._tokens, self._equal, self._lookup, self._end = tokens, equal, lookup, end
        self._rates, self._copied = acceptance.lookup, lookup.copied if lookup.copied_until == end else 0
        self.depths = len(tokens)

    def behind(self, depth: int, path: Sequence[int]) -> Ranked:
        rate = self._rates[lookup_kind(self._equal + depth, self._copied + depth)]
        return ((min(MOST_LIKELY, rate), self._tokens[depth]),)

    def best(self) -> Sequence[int]:
        return self._tokens

    def learn(self, written: Sequence[int], weight: float) -> None:
        right, rates = common(self._tokens, written), self._rates
        for depth in range(min(right + 1, self.depths, len(written))):
            kind = lookup_kind(self._equal + depth, self._copied + depth)
            rates[kind] += weight * ((depth < right) - rates[kind])
        whole = right and right == min(self.depths, len(written))
        self._lookup.copied = self._copied + right if whole else 0
        self._lookup.copied_until = self._end + len(written)


def prompt_lookup(most: int, thread: TokenSequence, acceptance: Acceptance) -> Continuation:
    """Up to `most` tokens that followed the last tokens where they occurred before in the prompt or text."""
    if (lookup := thread.draft_state.get("lookup")) is None:
        lookup = thread.draft_state["lookup"] = Lookup()
    tokens, equal = lookup.following(thread.tokens, most)
    return Continuation(tokens, equal, lookup, len(thread.tokens), acceptance)


class PhraseProposal:
    """What phrases propose behind the last tokens of a thread, and behind any draft token."""

    source, anywhere = "phrase", True

    def __init__(self, phrases: Phrases, tokens: Sequence[int], depths: int, acceptance: Acceptance) -> None:
        """Behind the last of these tokens; all depths have the same rates."""
        self._phrases, self._tokens, self.depths = phrases, tuple(tokens[-LONGEST:]), depths
        self._rates = acceptance.phrases

    def behind(self, depth: int, path: Sequence[int]) -> Ranked:
        found = self._phrases.following((*self._tokens, *path[1:]))
        if found is None:
            return ()
        given, right = self._rates
        return ((min(MOST_LIKELY, found[0] * right / max(given, 1e-9)), found[1]),)

    @cached_property
    def _chain(self) -> list[tuple[float, int]]:
        chain: list[tuple[float, int]] = []
        tokens = list(self._tokens)
        while len(chain) < self.depths and (found := self._phrases.following(tokens)):
            chain.append(found)
            tokens.append(found[1])
        return chain

    def best(self) -> Sequence[int]:
        return [token for _, token in self._chain]

    def learn(self, written: Sequence[int], weight: float) -> None:
        right, rates = common(self.best(), written), self._rates
        for depth in range(min(right + 1, len(self._chain), len(written))):
            rates[0] += weight * (self._chain[depth][0] - rates[0])
            rates[1] += weight * ((depth < right) - rates[1])


def phrase_lookup(phrases: Phrases, most: int, thread: TokenSequence, acceptance: Acceptance) -> PhraseProposal:
    """Up to `most` tokens from the phrases of a bundle."""
    return PhraseProposal(phrases, thread.tokens, most, acceptance)


def named_source(source: str) -> str:
    """The sources of a candidate as users know them, such as "mask slots + prompt lookup"."""
    return " + ".join([_NAMES.get(name, name) for name in source.split("+")])


# Each entry makes the source of a request, or returns None if the request does not use it.
SOURCES: dict[str, Callable[[DraftConfig], DraftSource | None]] = {
    "mask": lambda config: mask_slots if config.mask_slots else None,
    "head": lambda config: heads if config.heads else None,
    "lookup": lambda config: partial(prompt_lookup, config.lookup) if config.lookup else None,
    "phrase": lambda config: (
        partial(phrase_lookup, config.phrases, config.lookup) if config.phrases and config.lookup else None
    ),
}


def sources_for(draft_config: DraftConfig) -> list[DraftSource]:
    """The draft sources of one request."""
    made = [make(draft_config) for make in SOURCES.values()]
    return [source for source in made if source is not None]
