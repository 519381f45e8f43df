"""Audit: every kind of draft against plain decoding over some prompts, each token held against one-row logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from spaceport.runtime.session import Runtime
from spaceport.runtime.text.piece import Path
from spaceport.tools.verify.audit.audit_report import AuditReport, KindCounts, grade_mismatch
from spaceport.tools.verify.audit.judging import Mismatch, Rule, mismatches, rule_for, strays
from spaceport.tools.verify.audit.kinds import DraftGroup, DraftKind, groups_for
from spaceport.tools.verify.audit.noise import measure, noise_of
from spaceport.tools.verify.audit.prompts import TokenizedPrompt
from spaceport.tools.verify.audit.writing import AuditText, TextJob, write
from spaceport.tools.verify.thread_tokens import ThreadTokens

_IN_LINE = "drafts in one line"  # of bundles whose drafts are exact in no other shape


def audit(
    runtime: Runtime,
    questions: Sequence[TokenizedPrompt],
    max_tokens: int,
    stage: Callable[[str], None] = lambda _: None,
) -> AuditReport:
    """What drafts, threads and neighbours change in the texts that follow these prompts.

    The runtime must have nothing else to do meanwhile: its engine is also fed directly.
    """
    groups = groups_for(runtime.bundle.manifest, max_tokens)
    plain = []
    for group in groups:
        stage(f"writing {len(questions)} texts: {group.plain.name}")
        plain.append(write(runtime, [group.plain], questions, _each(1, questions), together=False))
    stage("measuring the noise of other widths")
    engine, signature = runtime.engine, runtime.engine.signature
    trees = runtime.bundle.manifest.exact_drafts == "tree"
    said = (type(engine).__name__, engine.device, signature.dtype, signature.lowering, *(() if trees else (_IN_LINE,)))
    report = AuditReport(", ".join(said))
    report.noise = measure(
        engine, [text.lines[()] for text in plain[0] if not text.fault], trees, runtime.bundle.manifest.activations
    )
    judges = [
        _Judge(runtime, group, texts, questions, report, max_tokens) for group, texts in zip(groups, plain, strict=True)
    ]
    for judge in judges:
        judge.plain(stage)
    for judge in judges:
        judge.drafted(stage)
    if runtime.engine.requests > 1:
        _together(runtime, judges, questions, stage)
    return report


def _each(kinds: int, questions: Sequence[TokenizedPrompt]) -> list[TextJob]:
    return [TextJob(kind, prompt) for prompt in range(len(questions)) for kind in range(kinds)]


def _together(
    runtime: Runtime, judges: Sequence[_Judge], questions: Sequence[TokenizedPrompt], stage: Callable[[str], None]
) -> None:
    """Texts of all kinds beside each other, so that their rows share calls."""
    kinds = [(judge, kind) for judge in judges for kind in judge.kinds]
    jobs = _each(len(kinds), questions)
    stage(f"writing {len(jobs)} texts of all kinds, {runtime.engine.requests} at a time")
    texts = write(runtime, [kind for _, kind in kinds], questions, jobs, together=True)
    stage("judging them")
    for number, (judge, kind) in enumerate(kinds):
        judge.judge(judge.counts(kind, runtime.engine.requests), texts[number :: len(kinds)])


class _Judge:
    """Holds the texts of one group of kinds against those of its plain decoding."""

    def __init__(
        self,
        runtime: Runtime,
        group: DraftGroup,
        plain: Sequence[AuditText],
        questions: Sequence[TokenizedPrompt],
        report: AuditReport,
        max_tokens: int,
    ) -> None:
        self._runtime, self._group, self._plain, self._questions = runtime, group, plain, questions
        self._report, self._max_tokens = report, max_tokens
        self._rule: Rule = rule_for(group, runtime.bundle.manifest.tokens)
        self._noise = noise_of(report.noise)

    @property
    def kinds(self) -> tuple[DraftKind, ...]:
        return (self._group.plain, *self._group.drafted)

    def plain(self, stage: Callable[[str], None]) -> None:
        """Hold the plain texts against their own logits, worked out again."""
        stage(f"checking {len(self._plain)} texts: {self._group.plain.name}")
        self.judge(self.counts(self._group.plain, reference=True), self._plain)

    def drafted(self, stage: Callable[[str], None]) -> None:
        """Write the texts of each kind alone, and hold them against the plain ones."""
        for kind in self._group.drafted:
            stage(f"writing {len(self._questions)} texts: {kind.name}")
            texts = write(self._runtime, [kind], self._questions, _each(1, self._questions), together=False)
            self.judge(self.counts(kind), texts)

    def counts(self, kind: DraftKind, requests: int = 1, reference: bool = False) -> KindCounts:
        """A new row of the report."""
        counts = KindCounts(kind.name, requests, reference)
        self._report.kinds.append(counts)
        return counts

    def judge(self, counts: KindCounts, texts: Sequence[AuditText]) -> None:
        """Note what there is to say of one text for each prompt."""
        for number, text in enumerate(texts):
            question, plain = self._questions[number], None if counts.reference else self._plain[number]
            found = self._mismatches(text, plain, len(question.tokens) + self._max_tokens)
            counts.texts += 1
            counts.tokens += text.tokens
            counts.steps += text.steps
            counts.identical += not found and not text.fault
            graded = [
                grade_mismatch(
                    self._runtime.tokenizer,
                    counts,
                    number + 1,
                    question.line,
                    text.lines.get(mismatch.path),
                    mismatch,
                    self._noise,
                )
                for mismatch in found
            ]
            counts.add(graded)
            self._report.mismatches.extend(graded)

    def _mismatches(self, text: AuditText, plain: AuditText | None, limit: int) -> list[Mismatch]:
        if text.fault:
            return [Mismatch((), 0, None, None, np.nan, text.fault)]
        against: dict[Path, ThreadTokens] = {} if plain is None else plain.lines
        found = [] if plain is None or plain.fault else strays(text.lines, against)
        for path, line in text.lines.items():
            other = against.get(path)
            if other is not None and other.tokens[: other.start] != line.tokens[: line.start]:
                other = None  # it hangs from another text
            found += mismatches(self._runtime.engine, self._rule, line, limit, other)
        return found
