"""Log probabilities of generated and of given tokens, from the model's own logits."""

from __future__ import annotations

import builtins
import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from spaceport.graphs.contract.faults import OptionFault, PanicsContained
from spaceport.runtime.decode.sequence import not_a_number
from spaceport.runtime.decode.sequence_group import RequestStep, Statistics
from spaceport.runtime.sampling.sampler import most_probable

_DECODER = re.compile(r'"type":\s*"(\w+)"')  # its kind in the JSON of a tokenizer
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte of a tokenizer with byte fallback


@dataclass
class Speller:
    """Spells the tokens of a tokenizer, each as it stands behind other text."""

    tokenizer: Tokenizer
    _known: dict[int, tuple[str, bytes]] = field(default_factory=dict, repr=False)

    def spell(self, token: int) -> tuple[str, bytes]:
        """The text of a token, a special one by its name, and the bytes that it adds to a text.

        Bytes that are no complete character are U+FFFD in the text. Both are empty for an id that the tokenizer does not have.
        """
        if token not in self._known:
            content = self.tokenizer.id_to_token(token) or ""
            raw = self._bytes(token, content) if content and token not in self._special else b""
            self._known[token] = (content if token in self._special else raw.decode("utf-8", "replace")), raw
        return self._known[token]

    def _bytes(self, token: int, content: str) -> bytes:
        if "ByteLevel" in self._decoders:
            known = all(character in _BYTE_OF for character in content)
            return bytes(_BYTE_OF[character] for character in content) if known else content.encode()
        if "ByteFallback" in self._decoders and (byte := _BYTE.fullmatch(content)):
            return bytes((int(byte[1], 16),))
        # Decoders treat the first token of a text apart, so the text of the second of two equal tokens counts.
        with PanicsContained(f"tokenizers decoded token {token}"):
            once, twice = (str(self.tokenizer.decode([token] * count)) for count in (1, 2))
        return (twice[len(once) :] if twice.startswith(once) else content).encode()

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, content in added.items() if content.special)

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The kinds of decoders that the tokenizer applies."""
        decoder = self.tokenizer.decoder
        return frozenset() if decoder is None else frozenset(_DECODER.findall(decoder.__getstate__().decode()))


def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for, as GPT-2 defines it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_of()


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
    """Observer that records the log probability of each token that a request generates.

    It keeps numbers, of which `at` builds objects: these would take ten times the memory for tokens that a slow client
    has not read.
    """

    top: int  # number of most probable tokens to report for each token
    speller: Speller
    # by the thread's path: ids and log probabilities, of each token and then of the most probable ones
    _recorded: dict[tuple[int, ...], tuple[array[int], array[float]]] = field(default_factory=dict)

    def on_step(self, step: RequestStep) -> None:
        """Record the tokens of a step; an end token or a limit may still cut off the last of them."""
        for part, verdict, logits in zip(step.parts, step.verdicts, step.logits, strict=True):
            if not verdict.tokens:
                continue
            recorded = self._recorded.setdefault(part.thread.path, (array("q"), array("d")))
            first = int(part.rows_wanted[0])
            rows = verdict.retained[part.layout.known - 1 :]
            start = int(part.positions[part.layout.known - 1]) + 1
            for position, (token, row) in enumerate(zip(verdict.tokens, rows, strict=True), start):
                tokens, logprobs = numbers_of(logits[row - first], token, self.top, position)
                recorded[0].extend(tokens)
                recorded[1].extend(logprobs)

    def at(self, path: tuple[int, ...], index: int) -> TokenLogprob:
        """The log probability of the token with this index among those that a thread generated."""
        tokens, logprobs = self._recorded[path]
        entries = slice(index * (1 + self.top), (index + 1) * (1 + self.top))
        return _token_logprob(tokens[entries], logprobs[entries], self.speller)


def numbers_of(line: NDArray[np.float32], token: int, top: int, position: int) -> tuple[list[int], list[float]]:
    """A token and the most probable ones, and their log probabilities, from the logits of a position."""
    peak = float(line.max())
    if not math.isfinite(peak):
        raise not_a_number(position)
    # Numbers around 1 are exact enough in float32; the sum of a vocabulary's many small ones is not.
    below = line - np.float32(peak)
    weight = math.log(np.exp(below, out=below).sum(dtype=np.float64))
    tokens = [token, *most_probable(line, top).tolist()] if top else [token]
    return tokens, [float(line[each]) - peak - weight for each in tokens]


def _token_logprob(tokens: Sequence[int], logprobs: Sequence[float], speller: Speller) -> TokenLogprob:
    """The log probability of the first of these tokens, with those of the others."""

    def of(index: int, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        token = tokens[index]
        return TokenLogprob(token, logprobs[index], top, *speller.spell(token))

    return of(0, tuple(of(index) for index in range(1, len(tokens))))


def check_top(name: str, top: int, vocab_size: int) -> None:
    """Raise unless the vocabulary has this number of tokens."""
    if not 0 <= top <= vocab_size:
        raise OptionFault(f"{name} is {top}: expected 0 to {vocab_size}, the size of the vocabulary")


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
        return math.fsum(token.logprob for token in self.logprobs)


class Scoring:
    """Observer that scores the tokens of a prompt, from index `start` on, while they are fed."""

    def __init__(self, tokens: Sequence[int], start: int, top: int, speller: Speller) -> None:
        self._tokens = tuple(tokens)
        self._start = start
        self._top = top
        self._speller = speller
        self._logprobs: list[TokenLogprob] = []
        self._greedy = True

    def on_step(self, step: RequestStep) -> None:
        """Score the tokens after the rows of a prefill chunk."""
        (part,), (verdict,), (own,) = step.parts, step.verdicts, step.logits
        for row, line in zip(part.rows_wanted.tolist(), own, strict=True):
            position = int(part.positions[row]) + 1
            if position < len(self._tokens):
                token = self._tokens[position]
                self._greedy &= token == line.argmax()
            else:
                (token,) = verdict.tokens
            self._logprobs.append(_token_logprob(*numbers_of(line, token, self._top, position), self._speller))

    def score(self, statistics: Statistics) -> Score:
        """The score, once the whole prompt has been fed by a request with these statistics."""
        *logprobs, following = self._logprobs
        return Score(self._tokens, self._start, tuple(logprobs), bool(self._greedy), following, statistics)
