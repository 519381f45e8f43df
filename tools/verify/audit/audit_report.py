"""Audit report: the counts and mismatches of an audit, as data and as a one-line summary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tokenizers import Tokenizer

from spaceport.runtime.comparison import ThreadTokens, TokenDifference
from spaceport.tools.verify.audit.noise import Noise, noise_of

_CONTEXT = 12  # tokens before a mismatch that are shown
_BOTH_TOKENS = 2  # noise may lower one token's logit and raise the other's


@dataclass(frozen=True)
class GradedMismatch:
    """A mismatch with its grade and its text."""

    mode: str
    requests: int  # concurrent requests
    prompt: int  # number of the prompt, from 1
    line: int  # line number in the prompt file
    mismatch: TokenDifference
    context: str  # text before the mismatch
    expected: str  # text of the expected token
    found: str  # text of the found token

    @property
    def grade(self) -> Literal["near-tie", "FAULT"]:
        return "near-tie" if self.mismatch.near_tie else "FAULT"

    def as_dict(self) -> dict[str, Any]:
        mismatch = self.mismatch
        return {
            "mode": self.mode,
            "requests": self.requests,
            "prompt": self.prompt,
            "line": self.line,
            "grade": self.grade,
            "thread": list(mismatch.path),
            "token": mismatch.token,
            "context": self.context,
            "expected": {"id": mismatch.expected, "text": self.expected},
            "found": {"id": mismatch.found, "text": self.found},
            "margin": mismatch.margin if math.isfinite(mismatch.margin) else None,
            "reason": mismatch.reason,
        }


@dataclass
class ModeCounts:
    """The counts of one decoding mode."""

    mode: str
    requests: int  # concurrent requests
    reference: bool = False  # plain decoding itself
    completions: int = 0
    tokens: int = 0
    steps: int = 0
    identical: int = 0  # completions equal to plain decoding
    near_ties: int = 0  # positions
    margin: float | None = None  # largest margin of a near-tie
    faults: int = 0

    def add(self, found: Sequence[GradedMismatch]) -> None:
        """Count the mismatches of one completion."""
        for graded in found:
            if graded.mismatch.near_tie:
                self.near_ties += 1
                self.margin = max(self.margin or 0.0, graded.mismatch.margin)
            else:
                self.faults += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "requests": self.requests,
            "reference": self.reference,
            "completions": self.completions,
            "tokens": self.tokens,
            "steps": self.steps,
            "identical": self.identical,
            "near_ties": self.near_ties,
            "margin": self.margin,
            "faults": self.faults,
        }


@dataclass
class AuditReport:
    """The result of an audit on one engine."""

    engine: str
    method: str  # by which the bundle drafts
    drafts: str  # such as "3 mask slots"
    noise: list[Noise] = field(default_factory=list)  # by step width
    modes: list[ModeCounts] = field(default_factory=list)
    mismatches: list[GradedMismatch] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def faults(self) -> int:
        """Number of faults: wrong tokens, and step widths with more noise than rounding explains."""
        return sum(counts.faults for counts in self.modes) + sum(not one.passed for one in self.noise)

    @property
    def drafted(self) -> list[ModeCounts]:
        """The modes that were compared with plain decoding."""
        return [counts for counts in self.modes if not counts.reference]

    @property
    def default(self) -> ModeCounts:
        """The counts of the default drafts, greedy and one request at a time."""
        return next(counts for counts in self.drafted if counts.mode.endswith("lookup"))

    @property
    def summary(self) -> str:
        """The verdict and the totals in one line."""
        completions = sum(counts.completions for counts in self.drafted)
        tokens = sum(counts.tokens for counts in self.drafted)
        near_ties = sum(counts.near_ties for counts in self.modes)
        margin = max((counts.margin for counts in self.modes if counts.margin is not None), default=None)
        noise = f"noise {_one_digit(noise_of(self.noise))}"
        measured = noise if margin is None else f"margin {_one_digit(margin)}, {noise}"
        verdict = "lossless" if self.passed else "NOT LOSSLESS"
        totals = [(completions, "completion"), (tokens, "token"), (self.faults, "fault"), (near_ties, "near-tie")]
        return f"{verdict}: {', '.join(_count(number, noun) for number, noun in totals)} ({measured})"

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "summary": self.summary,
            "engine": self.engine,
            "method": self.method,
            "drafts": self.drafts,
            "noise": noise_of(self.noise),
            "noise_by_width": [one.as_dict() for one in self.noise],
            "modes": [counts.as_dict() for counts in self.modes],
            "mismatches": [graded.as_dict() for graded in self.mismatches],
        }


def grade_mismatch(
    tokenizer: Tokenizer,
    counts: ModeCounts,
    prompt: int,
    line: int,
    thread: ThreadTokens | None,
    mismatch: TokenDifference,
    noise: float,
) -> GradedMismatch:
    """A mismatch with its grade and its text."""

    def text(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    before = () if thread is None else thread.tokens[max(0, mismatch.position - _CONTEXT) : mismatch.position]
    expected, found = ("" if token is None else text([token]) for token in (mismatch.expected, mismatch.found))
    mismatch = replace(mismatch, allowed=_BOTH_TOKENS * noise)
    return GradedMismatch(counts.mode, counts.requests, prompt, line, mismatch, text(before), expected, found)


def _one_digit(number: float) -> str:
    """A number with one significant digit, such as 2e-05."""

    return f"{number:.0e}" if number else "0"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
