"""Scoring: log probabilities of given text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from spaceport.runtime.decode.request import VerifiedStep
from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.sampling.logprobs import TokenLogprob, logprob_of
from spaceport.runtime.sampling.spelling import Speller


@dataclass(frozen=True)
class Score:
    """Log probability of each token of a given text after the tokens before it.

    - `tokens`: Token ids of the whole text, special tokens that the tokenizer adds included.
    - `start`: Index of the first scored token: the first one of the continuation, or 1.
    - `logprobs`: Log probability of each of `tokens[start:]`.
    - `greedy`: Whether each scored token is the most probable one at its position.
    - `following`: The token that greedy decoding would generate next, with its log probability.
    - `statistics`: Counts and times of the request.
    """

    tokens: tuple[int, ...]
    start: int
    logprobs: tuple[TokenLogprob, ...]
    greedy: bool
    following: TokenLogprob
    statistics: Statistics = field(default_factory=Statistics, compare=False, repr=False)

    @property
    def sum(self) -> float:
        """Log probability of all scored tokens together."""
        return math.fsum(one.logprob for one in self.logprobs)


class Scoring:
    """Observer that scores the tokens of a prompt, from index `start` on, while they are fed."""

    def __init__(self, tokens: Sequence[int], start: int, top: int, speller: Speller) -> None:
        self._tokens = tuple(tokens)
        self._start = start
        self._top = top
        self._speller = speller
        self._found: list[TokenLogprob] = []
        self._greedy = True

    def on_step(self, verified: VerifiedStep) -> None:
        """Score the tokens after the rows of a prefill chunk."""
        (part,), (verdict,), (own,) = verified.plan.parts, verified.verdicts, verified.logits
        for row, line in zip(part.rows_wanted.tolist(), own, strict=True):
            position = int(part.positions[row]) + 1
            if position < len(self._tokens):
                token = self._tokens[position]
                self._greedy &= token == line.argmax()
            else:
                (token,) = verdict.tokens
            self._found.append(logprob_of(line, token, self._top, position, self._speller))

    def score(self, statistics: Statistics | None = None) -> Score:
        """The score, once the whole prompt has been fed by a request with these statistics."""
        *found, following = self._found
        return Score(self._tokens, self._start, tuple(found), bool(self._greedy), following, statistics or Statistics())
