"""Logprobs: how likely a model found the tokens of a text, by its own logits and before anything is done to them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.request import VerifiedStep
from spaceport.runtime.decode.selector import not_a_number

_BLOCK = 128  # of a line of logits; the likeliest tokens are looked for in the blocks with the highest maxima


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was at its place, and which ones were likelier or nearly so."""

    token: int
    logprob: float  # natural logarithm
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens with their own, best first; of equals the lowest id


@dataclass
class Logprobs:
    """The log-probabilities of what each thread of a request writes, with so many of the likeliest tokens."""

    top: int
    _found: dict[tuple[int, ...], list[TokenLogprob]] = field(default_factory=dict)  # by the thread's path

    def on_step(self, verified: VerifiedStep) -> None:
        """Note the tokens of a step; an end or a limit may yet keep the last of them from being written."""
        for part, verdict, logits in zip(verified.plan.parts, verified.verdicts, verified.logits, strict=True):
            if not verdict.tokens:
                continue
            found = self._found.setdefault(part.thread.path, [])
            first = int(part.rows_wanted[0])
            rows = verdict.kept[part.layout.known - 1 :]
            start = int(part.positions[part.layout.known - 1]) + 1
            for place, (token, row) in enumerate(zip(verdict.tokens, rows, strict=True), start):
                found.append(logprob_in(logits[row - first], token, self.top, place))

    def at(self, path: tuple[int, ...], place: int) -> TokenLogprob:
        """That of one of the tokens that a thread wrote itself."""
        return self._found[path][place]


def logprob_in(line: NDArray[np.float32], token: int, top: int, place: int) -> TokenLogprob:
    """What a line of logits says of a token, which is decided at this place."""
    peak = float(line.max())
    if not math.isfinite(peak):
        raise not_a_number(place)
    # Numbers around 1 are exact enough in float32; their sum, of a vocabulary's many small ones, is not.
    below = line - np.float32(peak)
    weight = math.log(np.exp(below, out=below).sum(dtype=np.float64))
    best = tuple((other, float(line[other]) - peak - weight) for other in likeliest_in(line, top))
    return TokenLogprob(token, float(line[token]) - peak - weight, best)


def likeliest_in(line: NDArray[np.float32], count: int) -> list[int]:
    """The tokens with the highest logits, best first; of equals those with the lowest ids."""
    if not count:
        return []
    width = min(_BLOCK, line.size // count)  # at least one block for each: as many tokens are as high as its maximum
    maxima = np.maximum.reduceat(line, np.arange(0, line.size, width))
    least = np.partition(maxima, maxima.size - count)[maxima.size - count]
    tokens = np.flatnonzero(line >= least)
    found: list[int] = tokens[np.argsort(-line[tokens], kind="stable")[:count]].tolist()
    return found


def check_top(name: str, top: int, vocab_size: int) -> None:
    """Raise if nobody can give so many of the likeliest tokens."""
    if not 0 <= top <= vocab_size:
        raise OptionFault(f"{name} is {top}: expected 0 to {vocab_size}, the tokens that the model knows")
