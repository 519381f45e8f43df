"""Scoring: how likely a model finds a text that is given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from spaceport.runtime.decode.accept import Verdict
from spaceport.runtime.decode.plan import Plan
from spaceport.runtime.decode.request import Request
from spaceport.runtime.sampling.logprobs import TokenLogprob, logprob_in
from spaceport.runtime.text.tokenizer import encode


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

    def saw(
        self, request: Request, plan: Plan, verdicts: Sequence[Verdict], lines: Sequence[NDArray[np.float32]]
    ) -> None:
        """Note what the rows of a chunk say of the tokens behind them."""
        (part,), (verdict,), (own,) = plan.parts, verdicts, lines
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


def encode_parts(tokenizer: Tokenizer, prompt: str, continuation: str, special: bool) -> tuple[list[int], int]:
    """The tokens of a text, and which of them is the first that reaches into the continuation."""
    tokens = encode(tokenizer, prompt + continuation, special)
    ends = [end for _, end in tokenizer.encode(prompt + continuation, add_special_tokens=special).offsets]
    return tokens, next((place for place, end in enumerate(ends) if end > len(prompt)), len(tokens))
