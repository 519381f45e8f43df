"""Report: what an audit found, as data and in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from spaceport.tools.verify.audit.judging import Grade, Miss
from spaceport.tools.verify.audit.noise import Noise, noise_of
from spaceport.tools.verify.lines import Line

_AROUND = 12  # tokens before a place that are shown


@dataclass(frozen=True)
class Finding:
    """A place at which something else stands than plain decoding writes there, and what to make of it."""

    kind: str
    requests: int  # at a time
    prompt: int  # from 1
    line: int  # of the file
    grade: Grade
    miss: Miss
    start: int  # place of the first token that the thread wrote
    around: str  # what stands before it
    plain: str  # text of the token that plain decoding writes
    written: str

    def as_dict(self) -> dict[str, Any]:
        miss = self.miss
        return {
            "kind": self.kind,
            "requests": self.requests,
            "prompt": self.prompt,
            "line": self.line,
            "grade": self.grade,
            "thread": list(miss.path),
            "token": miss.place - self.start + 1,
            "around": self.around,
            "plain": {"id": miss.plain, "text": self.plain},
            "written": {"id": miss.written, "text": self.written},
            "margin": miss.margin if math.isfinite(miss.margin) else None,
            "said": miss.said,
        }


@dataclass
class Row:
    """What was found of one kind of draft."""

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

    def heard(self, found: Sequence[Finding]) -> None:
        """What was found in one text."""
        for finding in found:
            if finding.grade == "FAULT":
                self.faults += 1
            else:
                self.near_ties += 1
                self.margin = max(self.margin or 0.0, finding.miss.margin)

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
class Report:
    """What an audit found on one engine."""

    engine: str
    noise: list[Noise] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def faults(self) -> int:
        """Places with a fault, and widths whose noise is one."""
        return sum(row.faults for row in self.rows) + sum(not one.sound for one in self.noise)

    @property
    def drafted(self) -> list[Row]:
        """The rows of what was held against plain decoding."""
        return [row for row in self.rows if not row.reference]

    @property
    def statement(self) -> str:
        """All of it in one line."""
        texts, tokens = (sum(getattr(row, name) for row in self.drafted) for name in ("texts", "tokens"))
        near = sum(row.near_ties for row in self.rows)
        margin = max((row.margin for row in self.rows if row.margin is not None), default=None)
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
            "kinds": [row.as_dict() for row in self.rows],
            "findings": [finding.as_dict() for finding in self.findings],
        }


def finding_of(
    tokenizer: Tokenizer, row: Row, prompt: int, line_of_file: int, line: Line | None, miss: Miss, noise: float
) -> Finding:
    """A miss with the text around it."""

    def text(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    before = () if line is None else line.tokens[max(0, miss.place - _AROUND) : miss.place]
    plain, written = ("" if token is None else text([token]) for token in (miss.plain, miss.written))
    start = miss.place if line is None else line.start
    grade = miss.grade(noise)
    return Finding(row.kind, row.requests, prompt, line_of_file, grade, miss, start, text(before), plain, written)


def _rounded(number: float) -> str:
    """Such as 2e-05."""
    return f"{number:.0e}" if number else "0"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
