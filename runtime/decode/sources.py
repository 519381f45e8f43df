"""Draft sources: what proposes draft tokens, and how often those of each source are accepted.

Every generated token shows whether each source had predicted it, also if it was not drafted. Only mask slots have to be
fed to be measured.

Another source is a class here or elsewhere, and one entry of `SOURCES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from spaceport.graphs.contract.draft_methods import MAX_DEPTHS, DraftAcceptance, is_copying, lookup_kind
from spaceport.graphs.contract.phrases import LONGEST
from spaceport.runtime.decode.draft import MOST_LIKELY, Candidates, DraftConfig, Proposal, Ranked, best_chain, common
from spaceport.runtime.decode.phrases import Phrases
from spaceport.runtime.decode.sequence import TokenSequence

_LONGEST, _SHORTEST = 4, 2  # matching tokens; a single token predicts too little
_NAMES = {"mask": "mask slots", "head": "heads", "lookup": "prompt lookup", "phrase": "phrases"}  # as users read them
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


class LearningProposal(Proposal, Protocol):
    """A proposal that the tokens of its step show to be right or wrong, whether it was drafted or not."""

    @property
    def copying(self) -> bool:
        """Whether it continues a text that is being copied."""

    def best(self) -> Sequence[int]:
        """Its best token for each position, the best one before it being accepted."""

    def learn(self, written: Sequence[int], weight: float) -> int:
        """Learn from the tokens that the step generated, with this weight; returns the number of right ones of `best`."""


class DraftSource(Protocol):
    """Proposes draft tokens for the threads of one request."""

    def propose(self, thread: TokenSequence, acceptance: Acceptance) -> LearningProposal:
        """What it proposes behind the last token of a thread, by what `acceptance` knows; of no depth if nothing."""


class Predictions:
    """Candidates by position, with probabilities that are corrected by how often they were right."""

    copying = anywhere = False

    def __init__(self, source: str, candidates: Sequence[Candidates], last: int, acceptance: Acceptance) -> None:
        """Candidates behind the token `last`; their rates of acceptance are stored by the name of the source."""
        self._candidates, self._last, self._acceptance = candidates[:MAX_DEPTHS], last, acceptance
        self.source, self.depths = source, len(self._candidates)
        self._trust = acceptance.trust(source, self.depths)

    def behind(self, depth: int, path: Sequence[int]) -> Ranked:
        candidates, trust = self._candidates[depth].behind(path[-1]), self._trust[depth]
        ranked = zip(candidates.probabilities, candidates.tokens, strict=True)
        return [(min(MOST_LIKELY, probability) * trust, token) for probability, token in ranked]

    def best(self) -> Sequence[int]:
        return [candidates.tokens[0] for candidates in best_chain(self._candidates, self._last)]

    def learn(self, written: Sequence[int], weight: float) -> int:
        chain = best_chain(self._candidates, self._last)
        right = common([candidates.tokens[0] for candidates in chain], written)
        promised, accepted = self._acceptance.promises(self.source, self.depths)
        for depth in range(min(right + 1, len(chain), len(written))):
            promised[depth] += weight * (chain[depth].probabilities[0] - promised[depth])
            accepted[depth] += weight * ((depth < right) - accepted[depth])
        return right


class ModelPredictions:
    """What the mask slots or heads of the model predicted in the step before."""

    def __init__(self, name: str) -> None:
        self._name = name

    def propose(self, thread: TokenSequence, acceptance: Acceptance) -> Predictions:
        return Predictions(self._name, thread.candidates, thread.tokens[-1], acceptance)


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
        self.depths, self.copying = len(tokens), is_copying(self._copied)

    def behind(self, depth: int, path: Sequence[int]) -> Ranked:
        rate = self._rates[lookup_kind(self._equal + depth, self._copied + depth)]
        return ((min(MOST_LIKELY, rate), self._tokens[depth]),)

    def best(self) -> Sequence[int]:
        return self._tokens

    def learn(self, written: Sequence[int], weight: float) -> int:
        right, rates = common(self._tokens, written), self._rates
        for depth in range(min(right + 1, self.depths, len(written))):
            kind = lookup_kind(self._equal + depth, self._copied + depth)
            rates[kind] += weight * ((depth < right) - rates[kind])
        whole = right and right == min(self.depths, len(written))
        self._lookup.copied = self._copied + right if whole else 0
        self._lookup.copied_until = self._end + len(written)
        return right


class PromptLookup:
    """Prompt lookup: what followed the last tokens where they occurred before in the prompt or text."""

    def __init__(self, most: int) -> None:
        self._most = most  # tokens

    def propose(self, thread: TokenSequence, acceptance: Acceptance) -> Continuation:
        lookup = thread.draft_state.get("lookup")
        if lookup is None:
            lookup = thread.draft_state["lookup"] = Lookup()
        tokens, equal = lookup.following(thread.tokens, self._most)
        return Continuation(tokens, equal, lookup, len(thread.tokens), acceptance)


class PhraseProposal:
    """What phrases propose behind the last tokens of a thread, and behind any draft token."""

    source, copying, anywhere = "phrase", False, True

    def __init__(self, phrases: Phrases, tokens: Sequence[int], depths: int, acceptance: Acceptance) -> None:
        """Behind the last of these tokens; all depths have the same rates."""
        self._phrases, self._tokens, self.depths = phrases, tuple(tokens[-LONGEST:]), depths
        self._rates = acceptance.promises(self.source, 1)
        self._trust = acceptance.trust(self.source, 1)[0]

    def behind(self, depth: int, path: Sequence[int]) -> Ranked:
        found = self._phrases.following((*self._tokens, *path[1:]))
        return () if found is None else ((min(MOST_LIKELY, found[0] * self._trust), found[1]),)

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

    def learn(self, written: Sequence[int], weight: float) -> int:
        right, (promised, accepted) = common(self.best(), written), self._rates
        for depth in range(min(right + 1, len(self._chain), len(written))):
            promised[0] += weight * (self._chain[depth][0] - promised[0])
            accepted[0] += weight * ((depth < right) - accepted[0])
        return right


class PhraseLookup:
    """The phrases of a bundle."""

    def __init__(self, phrases: Phrases, most: int) -> None:
        self._phrases, self._most = phrases, most  # tokens

    def propose(self, thread: TokenSequence, acceptance: Acceptance) -> PhraseProposal:
        return PhraseProposal(self._phrases, thread.tokens, self._most, acceptance)


def named_source(source: str) -> str:
    """The sources of a candidate as users know them, such as "mask slots + prompt lookup"."""
    return " + ".join([_NAMES.get(name, name) for name in source.split("+")])


# Each entry makes the source of a request, or returns None if the request does not use it.
SOURCES: dict[str, Callable[[DraftConfig], DraftSource | None]] = {
    "mask": lambda config: ModelPredictions("mask") if config.mask_slots else None,
    "head": lambda config: ModelPredictions("head") if config.heads else None,
    "lookup": lambda config: PromptLookup(config.lookup) if config.lookup else None,
    "phrase": lambda config: PhraseLookup(config.phrases, config.lookup) if config.phrases and config.lookup else None,
}


def sources_for(draft_config: DraftConfig) -> list[DraftSource]:
    """The draft sources of one request."""
    made = [make(draft_config) for make in SOURCES.values()]
    return [source for source in made if source is not None]
