"""Sampled tokens that depend on the seed and never on drafts, as docs/sampling.md describes."""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.sequence import TokenSelector, TokenSequence, not_a_number
from spaceport.runtime.sampling.choice import Bans, Greedy
from spaceport.runtime.sampling.option_fields import check_options, documented, option

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_EXPONENT = np.uint64(0x3FF0000000000000)  # the bits of 1.0: with 52 bits of a fraction, a number from 1 to 2
_LESS_ONE = 1 - 2.0**-53  # leaves that fraction and half a step: never 0, never 1
_BLOCK = 16384  # tokens at a time, so that their arrays stay in the cache
_FAINT = -10.0  # score below which a candidate is too improbable to compute its noise
_UNLIKELY = 1e-3  # probability below which a candidate is not worth a row


def survivors(
    scores: NDArray[np.float64], top_k: int, top_p: float, min_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that pass all filters, in the order of their ids, with their scores.

    Scores are log probabilities up to a constant; the highest is 0. With top_k 0, top_p 1 and min_p 0 all pass.
    """
    tokens, left = _all_tokens(scores.size), scores
    if 0 < top_k < scores.size:
        tokens = np.sort(most_probable(scores, top_k))
        left = scores[tokens]
    if top_p < 1:
        passing = _nucleus(left, top_p)
        tokens, left = tokens[passing], left[passing]
    if min_p > 0:
        (passing,) = np.nonzero(left >= math.log(min_p))
        tokens, left = tokens[passing], left[passing]
    return tokens, left


def most_probable(scores: NDArray[np.floating[Any]], count: int) -> NDArray[np.int64]:
    """The tokens with the highest scores, best first; the lowest id first among equals."""
    # The maxima of `count` columns reach the lowest of them, so that far fewer scores have to be sorted.
    floor, columns = -np.inf, min(scores.size // 16, max(scores.size // 128, 16 * count))
    if 0 < count <= columns:
        maxima = scores[: scores.size // columns * columns].reshape(-1, columns).max(axis=0)
        floor = np.partition(maxima, columns - count)[columns - count]
    return _ranked(scores, floor)[:count]


def _nucleus(scores: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Indices of the fewest best scores that together have this share of the probability."""
    weights = np.exp(scores)
    total = weights.sum()
    enough = top_p * total
    order, reached = np.empty(0, np.int64), np.empty(0)
    for share in (1e-2, 1e-4, 1e-6, 0):  # usually a few tokens have nearly all of it, so there is little to sort
        order = _ranked(scores, math.log(total * share) if share else -np.inf)
        reached = weights[order].cumsum()
        if order.size and reached[-1] >= enough:
            break
    return np.sort(order[: np.searchsorted(reached, enough) + 1])


def _ranked(scores: NDArray[np.floating[Any]], floor: float) -> NDArray[np.int64]:
    """Indices of the scores that reach a limit, best first."""
    (near,) = np.nonzero(scores >= floor)
    return near[np.argsort(-scores[near], kind="stable")]


@lru_cache(maxsize=8)
def _all_tokens(count: int) -> NDArray[np.int64]:
    tokens = np.arange(count)
    tokens.setflags(write=False)
    return tokens


def noise_key(seed: int, path: tuple[int, ...], position: int) -> int:
    """The key of the noise at one position of one thread."""
    packed = struct.pack(f"<{len(path) + 3}Q", seed, len(path), *path, position)
    return int.from_bytes(hashlib.blake2b(packed).digest()[:8], "little")


def gumbels(key: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """The noise of these tokens under a key; each is independent of the others."""
    noise = np.empty(tokens.size, np.float64)
    scratch = np.empty(min(_BLOCK, tokens.size), np.uint64)
    for first in range(0, tokens.size, _BLOCK):
        block = noise[first : first + _BLOCK]
        np.add(tokens[first : first + _BLOCK].view(np.uint64), np.uint64(1), out=block.view(np.uint64))
        _from_counters(block, np.uint64(key), scratch[: block.size])
    return noise


def _from_counters(noise: NDArray[np.float64], key: np.uint64, scratch: NDArray[np.uint64]) -> None:
    """Turn the counters in this memory into noise, in place: SplitMix64, then two logarithms."""
    bits = noise.view(np.uint64)
    bits *= _GAMMA
    bits += key
    bits ^= np.right_shift(bits, np.uint64(30), out=scratch)
    bits *= _FIRST
    bits ^= np.right_shift(bits, np.uint64(27), out=scratch)
    bits *= _SECOND
    bits ^= np.right_shift(bits, np.uint64(31), out=scratch)
    bits >>= np.uint64(12)
    bits |= _EXPONENT
    noise -= _LESS_ONE
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)


@documented
@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the default is greedy decoding."""

    temperature: float = option(
        0.0, "Sampling temperature; 0 = greedy.", 0, 100, metavar="T", request="temperature", request_default=1.0
    )
    top_k: int = option(0, "Sample from this many most probable tokens; 0 = from all.", 0, metavar="K", request="top_k")
    top_p: float = option(
        1.0,
        "Sample from the fewest most probable tokens whose probabilities sum up to this.",
        0,
        1,
        metavar="P",
        request="top_p",
    )
    min_p: float = option(
        0.0,
        "Sample from tokens with at least this fraction of the highest probability.",
        0,
        1,
        metavar="P",
        request="min_p",
    )
    repetition_penalty: float = option(
        1.0,
        "Factor against tokens of the prompt and the text; above 1 = fewer repetitions.",
        0.01,
        100,
        request="repetition_penalty",
    )
    presence_penalty: float = option(
        0.0, "Subtracted from the logit of each token that the text has.", -2, 2, request="presence_penalty"
    )
    frequency_penalty: float = option(
        0.0, "Subtracted from a token's logit for each time that the text has it.", -2, 2, request="frequency_penalty"
    )
    logit_bias: Mapping[int, float] = option(
        dict,
        "Numbers from -100 to 100 that are added to the logits of token ids.",
        unset="none",
        metavar="ID=X",
        request="logit_bias",
    )
    banned: Collection[int] = option(
        (), "Token ids that are never generated.", unset="none", flag="--ban", metavar="TOKEN", request=None
    )
    seed: int | None = option(
        None,
        "Seed of sampled tokens: the same seed gives the same text; ignored at temperature 0.",
        0,
        2**64 - 1,
        unset="random for each request",
        request="seed",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.banned, Collection):
            raise OptionFault(f"banned is {self.banned!r}: expected token ids")
        if not isinstance(self.logit_bias, Mapping):
            raise OptionFault(f"logit_bias is {self.logit_bias!r}: expected token ids with biases")
        check_options(self)
        if not self.temperature:  # greedy decoding needs no seed
            object.__setattr__(self, "seed", None)
        for name, tokens in (("banned", self.banned), ("logit_bias", self.logit_bias)):
            if (wrong := next((token for token in tokens if not _is_token_id(token)), None)) is not None:
                raise OptionFault(f"a token id in {name} is {wrong!r}: expected a whole number of at least 0, not text")
        for token, bias in self.logit_bias.items():
            if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
                expected = "expected a number from -100 to 100; to forbid a token, put it in banned"
                raise OptionFault(f"the logit_bias of token {token} is {bias!r}: {expected}")
        object.__setattr__(self, "banned", frozenset(self.banned))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def check(self, vocab_size: int) -> None:
        """Raise for token ids outside the vocabulary."""
        check_ids("banned", self.banned, vocab_size)
        check_ids("logit_bias", self.logit_bias, vocab_size)
        if len(self.banned) >= vocab_size:
            raise OptionFault(f"banned holds all {vocab_size} tokens: expected at least one allowed token")

    @property
    def penalises(self) -> bool:
        """Whether penalties make tokens depend on the text before them."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def check_ids(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Raise for token ids outside the vocabulary."""
    if beyond := [token for token in tokens if token >= vocab_size]:
        raise OptionFault(f"{name} holds the token id {min(beyond)}: expected ids from 0 to {vocab_size - 1}")


def seeded(sampling: Sampling) -> Sampling:
    """The same options with a seed, a random one if it has none; greedy decoding needs none."""
    return (
        sampling
        if sampling.seed is not None or not sampling.temperature
        else replace(sampling, seed=secrets.randbits(64))
    )


def chooser(sampling: Sampling, bans: Bans, prompt_length: int) -> TokenSelector:
    """The token selector of one request with a prompt of this length; options that sample have a seed."""
    bans = replace(bans, never=bans.never | frozenset(sampling.banned))
    if sampling.temperature == 0 and not sampling.penalises and not sampling.logit_bias:
        return Greedy(bans)
    return Sampled(sampling, bans, prompt_length)


@dataclass
class _Counts:
    """The distinct tokens of a thread, and how often each is in the text after the prompt."""

    thread: TokenSequence
    prompt_length: int
    counted: int = 0  # number of the thread's tokens counted so far
    index: dict[int, int] = field(default_factory=dict)
    tokens: array[int] = field(default_factory=lambda: array("q"))
    own: array[int] = field(default_factory=lambda: array("q"))  # occurrences after the prompt

    def follow(self) -> None:
        """Count the thread's new tokens; its tokens never change, they are only appended."""
        prompt = max(self.counted, self.prompt_length)
        self.add(self.thread.tokens[self.counted : prompt], 0)
        self.add(self.thread.tokens[prompt:], 1)
        self.counted = len(self.thread.tokens)

    def add(self, tokens: Iterable[int], own: int) -> None:
        for token in tokens:
            index = self.index.setdefault(token, len(self.tokens))
            if index == len(self.tokens):
                self.tokens.append(token)
                self.own.append(0)
            self.own[index] += own

    def and_then(self, ahead: Sequence[int]) -> _Counts:
        """The counts including tokens that a step has selected but the thread does not have yet."""
        if not ahead:
            return self
        longer = replace(self, index=self.index.copy(), tokens=self.tokens[:], own=self.own[:])
        longer.add(ahead, 1)
        return longer


@dataclass
class Sampled:
    """Sampling with the Gumbel-max trick: the token with the highest sum of log probability and noise.

    The token at a position is a function of its logits, the tokens before it, the position, the thread's path and the
    seed, so drafts, prefill chunks and other threads cannot change it.
    """

    sampling: Sampling
    bans: Bans
    prompt_length: int
    _counts: dict[tuple[int, ...], _Counts] = field(default_factory=dict, repr=False)  # of the live threads

    def token(self, logits: NDArray[np.float32], thread: TokenSequence, ahead: Sequence[int]) -> int:
        position = len(thread.tokens) + len(ahead)
        if not math.isfinite(logits.max()):
            raise not_a_number(position)
        scores = self._scores(logits, self.bans.at(thread, ahead), thread, ahead)
        if scores.max() == -np.inf:
            raise OptionFault(
                f"all tokens are banned or impossible at position {position}: expected at least one allowed token: ban fewer"
            )
        sampling = self.sampling
        if sampling.temperature == 0:
            return int(scores.argmax())
        tokens, noised = survivors(self._tempered(scores), sampling.top_k, sampling.top_p, sampling.min_p)
        noised = noised + gumbels(noise_key(self.sampling.seed or 0, thread.path, position), tokens)
        return int(tokens[noised.argmax()])

    def candidates(
        self, logits: NDArray[np.float32], thread: TokenSequence, position: int, most: int
    ) -> tuple[Candidates, ...]:
        """Candidates of mask slots, sampled with the noise of their positions, so that the model likely samples the same."""
        banned = self.bans.among_candidates(thread)
        candidates = []
        for at, line in enumerate(logits, position):
            scores = self._scores(line, banned, thread, ())
            if np.isfinite(scores.max()):
                candidates.append(self._candidates(scores, thread.path, at, most))
            else:  # an error here must not end a completion that continues without the draft
                candidates.append(Candidates((int(scores.argmax()),), (0.0,)))
        return tuple(candidates)

    def _candidates(self, scores: NDArray[np.float64], path: tuple[int, ...], position: int, most: int) -> Candidates:
        """The tokens that pass the filters, best first, with the probability that the model samples them.

        The error of a mask slot depends neither on the filters nor on the temperature, so the probabilities are a softmax
        over logits + temperature * noise. Measured on the demo model: docs/sampling.md.
        """
        sampling = self.sampling
        temperature = sampling.temperature
        passing = np.ones(scores.size, np.bool_)
        if temperature > 0:
            scores = self._tempered(scores)
            passing[:] = False
            passing[survivors(scores, sampling.top_k, sampling.top_p, sampling.min_p)[0]] = True
        else:
            scores -= scores.max()
        (tokens,) = np.nonzero(scores >= _FAINT)
        noised_scores = scores[tokens]
        if temperature > 0:
            noised_scores += gumbels(noise_key(self.sampling.seed or 0, path, position), tokens)
            noised_scores *= temperature
        weights = np.exp(noised_scores - noised_scores.max())
        probabilities = weights / weights.sum()
        (allowed,) = np.nonzero(passing[tokens])
        order = allowed[most_probable(noised_scores[allowed], most)]
        order = order[: max(1, np.count_nonzero(probabilities[order] > _UNLIKELY))]
        return Candidates(tuple(tokens[order].tolist()), tuple(probabilities[order].tolist()))

    def _scores(
        self, logits: NDArray[np.float32], banned: frozenset[int], thread: TokenSequence, ahead: Sequence[int]
    ) -> NDArray[np.float64]:
        """Logits with bias, penalties and bans; bans come last, so that nothing lifts them."""
        scores = logits.astype(np.float64)
        for token, bias in self.sampling.logit_bias.items():
            scores[token] += bias
        if self.sampling.penalises:
            _penalise(scores, self.sampling, self._counted(thread).and_then(ahead))
        scores[_columns(banned)] = -np.inf
        return scores

    def _tempered(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log probabilities up to a constant, the highest is 0; overwrites `scores`."""
        top = scores.max()
        if top == np.inf:  # the limit for growing logits
            return np.where(scores == top, 0.0, -np.inf)
        scores -= top
        if self.sampling.temperature != 1:
            with np.errstate(over="ignore"):  # -inf is the right result
                scores /= self.sampling.temperature
        return scores

    def _counted(self, thread: TokenSequence) -> _Counts:
        counts = self._counts.get(thread.path)
        if counts is None or counts.thread is not thread:
            for path in [path for path, old in self._counts.items() if old.thread.ending is not None]:
                del self._counts[path]
            counts = self._counts[thread.path] = _Counts(thread, self.prompt_length)
        counts.follow()
        return counts


def _penalise(scores: NDArray[np.float64], sampling: Sampling, counts: _Counts) -> None:
    tokens, own = np.array(counts.tokens), np.array(counts.own)
    held = scores[tokens]
    penalty = sampling.repetition_penalty
    held = np.where(held < 0, held * penalty, held / penalty)
    held -= sampling.frequency_penalty * own
    held -= sampling.presence_penalty * (own > 0)
    scores[tokens] = held


@lru_cache(maxsize=64)
def _columns(banned: frozenset[int]) -> NDArray[np.int64]:
    return np.array(sorted(banned), np.int64)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
