"""Judging: each token of a text held against the logits that plain decoding has at its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.threads import new_thread
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Engine
from spaceport.runtime.sampling.choice import Bans
from spaceport.runtime.sampling.noise import gumbels, noise_key
from spaceport.runtime.text.piece import Path
from spaceport.tools.verify.audit.kinds import DraftGroup
from spaceport.tools.verify.feeding import Logits, logits_of
from spaceport.tools.verify.thread_tokens import ThreadTokens, first_difference

Grade = Literal["near-tie", "FAULT"]
_BOTH_WAYS = 2  # of two tokens, one may have lost by the noise what the other has won


@dataclass(frozen=True)
class Mismatch:
    """A position at which a text differs from what plain decoding writes there."""

    path: Path
    place: int  # in the thread, its prompt counted
    plain: int | None  # the token that plain decoding writes; none: it has ended
    written: int | None  # the token that stands there; none: nothing does
    margin: float  # by how much the one is ahead of the other in plain decoding's logits; inf: it can never be written
    said: str = ""  # what is wrong if it is not a matter of margins

    def grade(self, noise: float) -> Grade:
        """Whether rounding explains it."""
        return "near-tie" if not self.said and self.margin <= _BOTH_WAYS * noise else "FAULT"  # NaN is a fault


@dataclass(frozen=True)
class Rule:
    """How a group of kinds chooses tokens, worked out apart from the runtime's own choice."""

    tokens: TokenIds
    bans: Bans
    seed: int | None

    def scores(self, logits: Logits, line: ThreadTokens, place: int) -> NDArray[np.float64]:
        """Of each token at a place: the one with the highest is written there, of equals the lowest id."""
        scores = logits.astype(np.float64)
        if self.seed is not None:
            scores += gumbels(noise_key(self.seed, line.path, place), np.arange(scores.size))
        before = new_thread(line.tokens[place - 1 : place], 0)
        before.path = line.path
        scores[list(self.bans.at(before, ()))] = -np.inf
        return scores


def rule_for(group: DraftGroup, tokens: TokenIds) -> Rule:
    """The rule of a group of kinds."""
    never = frozenset(tokens.forbidden)
    if group.forks:
        return Rule(tokens, Bans(never, tokens.fork, tokens.child, Decoding.max_depth), group.seed)
    return Rule(tokens, Bans(never | frozenset(tokens.fork_ids)), group.seed)


def mismatches(
    engine: Engine, rule: Rule, line: ThreadTokens, limit: int, plain: ThreadTokens | None = None
) -> list[Mismatch]:
    """Every place of a line that plain decoding fills otherwise, from where it parts from the plain line on.

    The line is fed as it stands, one row a step: so what follows a difference is judged behind that difference. `limit`
    is how long a line may become.
    """
    apart = line.start if plain is None else first_difference(line, plain)
    if apart is None:
        return []
    logits = logits_of(engine, line)
    found = [*_mismatches(rule, line, logits, apart), *_at_its_end(line, limit)]
    if plain is not None and apart < min(_places(line), _places(plain)):
        found = [
            _against(rule, line, plain, apart, logits),
            *(mismatch for mismatch in found if mismatch.place != apart),
        ]
    return found


def strays(lines: dict[Path, ThreadTokens], plain: dict[Path, ThreadTokens]) -> list[Mismatch]:
    """The threads that only one of two texts has, though all before their forks is the same."""
    found = []
    for path in sorted(lines.keys() ^ plain.keys()):
        before = path[:-1]
        if before not in lines or before not in plain or lines[before].cut or plain[before].cut:
            continue
        if first_difference(lines[before], plain[before]) is None:
            said = "the thread is missing" if path in plain else "plain decoding has no such thread"
            found.append(Mismatch(path, (lines | plain)[path].start, None, None, np.inf, said))
    return found


def _mismatches(rule: Rule, line: ThreadTokens, logits: Logits, first: int) -> Iterator[Mismatch]:
    for place in range(first, _places(line)):
        scores = rule.scores(logits[place - line.start], line, place)
        written, best = _written(rule, line, place, scores), int(scores.argmax())
        if np.isnan(scores).any():
            yield Mismatch(line.path, place, None, written, np.nan, "the logits hold NaN")
        elif best != written:
            yield Mismatch(line.path, place, best, written, float(scores[best] - scores[written]))


def _at_its_end(line: ThreadTokens, limit: int) -> list[Mismatch]:
    """What is wrong with a line that neither ended nor came to its limit, or went beyond it."""
    place = len(line.tokens)
    if line.ended or line.cut or max(limit, line.start) == place:
        return []
    said = f"the text ends {'too early' if place < limit else 'too late'}, its limit is {limit}"
    return [Mismatch(line.path, place, None, None, np.inf, said)]


def _against(rule: Rule, line: ThreadTokens, plain: ThreadTokens, place: int, logits: Logits) -> Mismatch:
    """The first difference of two texts, by what both have there.

    The plain text has the likeliest token there, but on an engine that does not do the same thing twice.
    """
    scores = rule.scores(logits[place - line.start], line, place)
    rival, written = _written(rule, plain, place, scores), _written(rule, line, place, scores)
    margin = float(scores.max() - min(scores[rival], scores[written]))
    return Mismatch(line.path, place, rival, written, margin, "the logits hold NaN" if np.isnan(margin) else "")


def _written(rule: Rule, line: ThreadTokens, place: int, scores: NDArray[np.float64]) -> int:
    """The token at a place; behind the last one the likeliest of those that end a text."""
    if place < len(line.tokens):
        return line.tokens[place]
    return max(rule.tokens.end, key=lambda token: (scores[token], -token))


def _places(line: ThreadTokens) -> int:
    """How many places a line fills, the end token's among them."""
    return len(line.tokens) + line.ended
