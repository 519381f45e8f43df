"""Slow sampling: the rules of docs/sampling.md and the noise of a seed for each token, in plain Python."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence

from spaceport.runtime.sampling.sampler import Sampling

_64_BITS = 2**64 - 1


def scores_slowly(
    logits: Sequence[float], sampling: Sampling, prompt: Sequence[int], text: Sequence[int], banned: Collection[int]
) -> list[float]:
    """Logits with bias, penalties and bans."""
    scores = []
    for token, logit in enumerate(logits):
        score = logit + sampling.logit_bias.get(token, 0)
        if token in prompt or token in text:
            penalty = sampling.repetition_penalty
            score = score * penalty if score < 0 else score / penalty
        score -= sampling.frequency_penalty * text.count(token)
        if token in text:
            score -= sampling.presence_penalty
        scores.append(-math.inf if token in banned else score)
    return scores


def survivors_slowly(scores: Sequence[float], sampling: Sampling) -> list[int]:
    """The tokens that pass the filters, given unnormalized log probabilities."""
    ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    weights = [math.exp(scores[token] - max(scores)) for token in ranked]
    if sampling.top_p < 1:
        count = 1
        while count < len(ranked) and math.fsum(weights[:count]) < sampling.top_p * math.fsum(weights):
            count += 1
        ranked = ranked[:count]
    least = math.log(sampling.min_p) if sampling.min_p else -math.inf
    return sorted(token for token in ranked if scores[token] - max(scores) >= least)


def probabilities_slowly(scores: Sequence[float], sampling: Sampling) -> list[float]:
    """The probability of each token, given logits with bias, penalties and bans."""
    tempered = [score / sampling.temperature for score in scores]
    left = set(survivors_slowly(tempered, sampling))
    weights = [math.exp(score - max(tempered)) if token in left else 0.0 for token, score in enumerate(tempered)]
    return [weight / math.fsum(weights) for weight in weights]


def noise_slowly(seed: int, path: tuple[int, ...], position: int, token: int) -> float:
    """The noise of a token at a position."""
    numbers = (seed, len(path), *path, position)
    packed = b"".join(number.to_bytes(8, "little") for number in numbers)
    key = int.from_bytes(hashlib.blake2b(packed).digest()[:8], "little")
    mixed = mix(key, token + 1)
    uniform = ((mixed >> 12) + 0.5) / 2**52
    return -math.log(-math.log(uniform))


def mix(key: int, count: int) -> int:
    """Output number `count` of SplitMix64."""
    z = (key + count * 0x9E3779B97F4A7C15) & _64_BITS
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _64_BITS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _64_BITS
    return z ^ (z >> 31)
