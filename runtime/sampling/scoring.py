"""Scoring: how likely a model finds a text that is given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spaceport.runtime.decode.request import VerifiedStep
from spaceport.runtime.sampling.logprobs import TokenLogprob, logprob_in


@dataclass(frozen=True)
class Score:
    """How likely a model finds each token of a text behind all those before it."""

    tokens: tuple[int, ...]  # of the whole text
    start: (
        int  # place of the first token that is scored: where the continuation begins, or 1: nothing is before the first
    )
    logprobs: tuple[TokenLogprob, ...]  # of each token from there on
    greedy: bool  # whether each of these is the likeliest at its place
    following: TokenLogprob  # of the token that greedy decoding would write behind the text

    @property
    def sum(self) -> float:
        """The log-probability of all that is scored."""
        return math.fsum(one.logprob for one in self.logprobs)


class Scoring:
    """Looks at a prompt's tokens as they are fed, from one of them on."""

    def __init__(self, tokens: Sequence[int], start: int, top: int) -> None:
        self._tokens = tuple(tokens)
        self._start = start
        self._top = top
        self._found: list[TokenLogprob] = []
        self._greedy = True

    def on_step(self, verified: VerifiedStep) -> None:
        """Note what the rows of a chunk say of the tokens behind them."""
        (part,), (verdict,), (own,) = verified.plan.parts, verified.verdicts, verified.logits
        for row, line in zip(part.rows_wanted.tolist(), own, strict=True):
            place = int(part.positions[row]) + 1
            if place < len(self._tokens):
                token = self._tokens[place]
                self._greedy &= token == line.argmax()
            else:
                (token,) = verdict.tokens
            self._found.append(logprob_in(line, token, self._top, place))

    def score(self) -> Score:
        """The score, when all is fed."""
        *found, following = self._found
        return Score(self._tokens, self._start, tuple(found), bool(self._greedy), following)
