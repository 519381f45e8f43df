"""Log probabilities of generated tokens, from the model's own logits before penalties, bans and temperature."""

from __future__ import annotations

import builtins
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.request import VerifiedStep
from spaceport.runtime.decode.selector import not_a_number
from spaceport.runtime.sampling.spelling import Speller

_BLOCK = 128  # logits; the most probable tokens are searched in the blocks with the highest maxima


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of one token, and those of the most probable tokens at its position.

    - `token`: Token id.
    - `logprob`: Natural logarithm of the token's probability.
    - `top`: The most probable tokens at this position, best first, the lowest id first among equals.
    - `text`: The token as text, with U+FFFD for bytes that are not a complete character; a special token's name.
    - `bytes`: UTF-8 bytes that the token adds to the text; empty for special tokens.
    """

    token: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    text: str = ""
    bytes: builtins.bytes = b""


@dataclass
class Logprobs:
    """Observer that records the log probability of each token that a request generates."""

    top: int  # number of most probable tokens to report for each token
    speller: Speller | None = None  # None: without text and bytes
    _found: dict[tuple[int, ...], list[TokenLogprob]] = field(default_factory=dict)  # by the thread's path

    def on_step(self, verified: VerifiedStep) -> None:
        """Record the tokens of a step; an end token or a limit may still cut off the last of them."""
        for part, verdict, logits in zip(verified.plan.parts, verified.verdicts, verified.logits, strict=True):
            if not verdict.tokens:
                continue
            found = self._found.setdefault(part.thread.path, [])
            first = int(part.rows_wanted[0])
            rows = verdict.retained[part.layout.known - 1 :]
            start = int(part.positions[part.layout.known - 1]) + 1
            for position, (token, row) in enumerate(zip(verdict.tokens, rows, strict=True), start):
                found.append(logprob_of(logits[row - first], token, self.top, position, self.speller))

    def at(self, path: tuple[int, ...], index: int) -> TokenLogprob:
        """The log probability of the token with this index among those that a thread generated."""
        return self._found[path][index]


def logprob_of(
    line: NDArray[np.float32], token: int, top: int, position: int, speller: Speller | None = None
) -> TokenLogprob:
    """The log probability of a token at a position, from the logits of that position."""
    peak = float(line.max())
    if not math.isfinite(peak):
        raise not_a_number(position)
    # Numbers around 1 are exact enough in float32; the sum of a vocabulary's many small ones is not.
    below = line - np.float32(peak)
    weight = math.log(np.exp(below, out=below).sum(dtype=np.float64))

    def of(each: int, best: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        return TokenLogprob(each, float(line[each]) - peak - weight, best, *(speller.spell(each) if speller else ()))

    return of(token, tuple(of(other) for other in most_probable(line, top)))


def most_probable(line: NDArray[np.float32], count: int) -> list[int]:
    """The tokens with the highest logits, best first; the lowest id first among equals."""
    if not count:
        return []
    width = min(_BLOCK, line.size // count)  # `count` blocks or more: as many tokens reach the maximum of some block
    maxima = np.maximum.reduceat(line, np.arange(0, line.size, width))
    least = np.partition(maxima, maxima.size - count)[maxima.size - count]
    tokens = np.flatnonzero(line >= least)
    found: list[int] = tokens[np.argsort(-line[tokens], kind="stable")[:count]].tolist()
    return found


def check_top(name: str, top: int, vocab_size: int) -> None:
    """Raise unless the vocabulary has this number of tokens."""
    if not 0 <= top <= vocab_size:
        raise OptionFault(f"{name} is {top}: expected 0 to {vocab_size}, the size of the vocabulary")
