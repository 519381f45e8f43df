"""Audit report: what an audit found, as data and in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from spaceport.tools.verify.audit.judging import Grade, Mismatch
from spaceport.tools.verify.audit.noise import Noise, noise_of
from spaceport.tools.verify.thread_tokens import ThreadTokens

_AROUND = 12  # tokens before a place that are shown


@dataclass(frozen=True)
class GradedMismatch:
    """A mismatch with its grade and the text around it."""

    kind: str
    requests: int  # at a time
    prompt: int  # from 1
    line: int  # of the file
    grade: Grade
    mismatch: Mismatch
    start: int  # place of the first token that the thread wrote
    around: str  # what stands before it
    plain: str  # text of the token that plain decoding writes
    written: str

    def as_dict(self) -> dict[str, Any]:
        mismatch = self.mismatch
        return {
            "kind": self.kind,
            "requests": self.requests,
            "prompt": self.prompt,
            "line": self.line,
            "grade": self.grade,
            "thread": list(mismatch.path),
            "token": mismatch.place - self.start + 1,
            "around": self.around,
            "plain": {"id": mismatch.plain, "text": self.plain},
            "written": {"id": mismatch.written, "text": self.written},
            "margin": mismatch.margin if math.isfinite(mismatch.margin) else None,
            "said": mismatch.said,
        }


@dataclass
class KindCounts:
    """The counts of one kind of draft."""

    kind: str
    requests: int  # at a time
    reference: bool = False  # plain decoding itself
    texts: int = 0
    tokens: int = 0
    steps: int = 0
    identical: int = 0  # texts
    near_ties: int = 0  # places
    margin: float | None = None  # the largest of a near-tie
    faults: int = 0

    def add(self, found: Sequence[GradedMismatch]) -> None:
        """Count the mismatches of one text."""
        for graded in found:
            if graded.grade == "FAULT":
                self.faults += 1
            else:
                self.near_ties += 1
                self.margin = max(self.margin or 0.0, graded.mismatch.margin)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "requests": self.requests,
            "reference": self.reference,
            "texts": self.texts,
            "tokens": self.tokens,
            "steps": self.steps,
            "identical": self.identical,
            "near_ties": self.near_ties,
            "margin": self.margin,
            "faults": self.faults,
        }


@dataclass
class AuditReport:
    """What an audit found on one engine."""

    engine: str
    noise: list[Noise] = field(default_factory=list)
    kinds: list[KindCounts] = field(default_factory=list)
    mismatches: list[GradedMismatch] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def faults(self) -> int:
        """Places with a fault, and widths whose noise is one."""
        return sum(counts.faults for counts in self.kinds) + sum(not one.sound for one in self.noise)

    @property
    def drafted(self) -> list[KindCounts]:
        """The rows of what was held against plain decoding."""
        return [counts for counts in self.kinds if not counts.reference]

    @property
    def statement(self) -> str:
        """All of it in one line."""
        texts, tokens = (sum(getattr(counts, name) for counts in self.drafted) for name in ("texts", "tokens"))
        near = sum(counts.near_ties for counts in self.kinds)
        margin = max((counts.margin for counts in self.kinds if counts.margin is not None), default=None)
        noise = f"noise {_rounded(noise_of(self.noise))}"
        told = noise if margin is None else f"margin {_rounded(margin)}, {noise}"
        verdict = "lossless" if self.passed else "NOT LOSSLESS"
        return f"{verdict}: {_count(texts, 'text')}, {_count(tokens, 'token')}, {_count(self.faults, 'fault')}, {_count(near, 'near-tie')} ({told})"

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "statement": self.statement,
            "engine": self.engine,
            "noise": noise_of(self.noise),
            "widths": [one.as_dict() for one in self.noise],
            "kinds": [counts.as_dict() for counts in self.kinds],
            "findings": [graded.as_dict() for graded in self.mismatches],
        }


def grade_mismatch(
    tokenizer: Tokenizer,
    counts: KindCounts,
    prompt: int,
    line_of_file: int,
    line: ThreadTokens | None,
    mismatch: Mismatch,
    noise: float,
) -> GradedMismatch:
    """A mismatch with its grade and the text around it."""

    def text(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    before = () if line is None else line.tokens[max(0, mismatch.place - _AROUND) : mismatch.place]
    plain, written = ("" if token is None else text([token]) for token in (mismatch.plain, mismatch.written))
    start = mismatch.place if line is None else line.start
    grade = mismatch.grade(noise)
    return GradedMismatch(
        counts.kind, counts.requests, prompt, line_of_file, grade, mismatch, start, text(before), plain, written
    )


def _rounded(number: float) -> str:
    """Such as 2e-05."""
    return f"{number:.0e}" if number else "0"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
