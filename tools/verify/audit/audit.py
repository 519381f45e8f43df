"""Audit: every decoding mode compared with plain decoding over a set of prompts, each token verified by one-row logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from spaceport.runtime.comparison import ThreadTokens, TokenDifference
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.transcript import Path
from spaceport.tools.verify.audit.audit_report import AuditReport, ModeCounts, grade_mismatch
from spaceport.tools.verify.audit.generating import AuditCompletion, AuditJob, generate
from spaceport.tools.verify.audit.mismatches import (
    SelectionRule,
    find_mismatches,
    selection_rule,
    unmatched_threads,
)
from spaceport.tools.verify.audit.modes import AuditMode, ModeGroup, groups_for
from spaceport.tools.verify.audit.noise import measure, noise_of
from spaceport.tools.verify.audit.prompts import TokenizedPrompt
from spaceport.tools.verify.draft_names import PREDICTOR_NAMES, named_drafts

_LIMITED = {
    "chain": "drafts as chains",
    "none": "drafts are not exact",
}  # of engines on which draft trees are not exact


def audit(
    runtime: Runtime,
    prompts: Sequence[TokenizedPrompt],
    max_tokens: int,
    on_progress: Callable[[str], None] = lambda _: None,
) -> AuditReport:
    """What drafts, forked threads and batching change in the completions of these prompts.

    No other request may run on the runtime meanwhile: the audit also feeds its engine directly.
    """
    groups = groups_for(runtime.bundle.manifest, runtime.exactness, max_tokens)
    plain = []
    for group in groups:
        on_progress(f"generating {len(prompts)} completions: {group.plain.name}")
        plain.append(generate(runtime, [group.plain], prompts, _jobs(1, prompts), batched=False))
    on_progress("measuring the noise of other step widths")
    manifest = runtime.bundle.manifest
    drafts = named_drafts(manifest.drafts.max_tokens, PREDICTOR_NAMES[manifest.drafts.predictor])
    report = AuditReport(_engine_name(runtime), manifest.drafts.name, drafts)
    threads = [completion.threads[()] for completion in plain[0] if not completion.error]
    trees = runtime.exactness.drafts == "tree"  # their slots have gaps, as those of trees
    report.noise = measure(runtime.engine, threads, trees, runtime.bundle.manifest.activations)
    audits = [
        _GroupAudit(runtime, group, completions, prompts, report, max_tokens)
        for group, completions in zip(groups, plain, strict=True)
    ]
    for group_audit in audits:
        group_audit.verify_plain(on_progress)
    for group_audit in audits:
        group_audit.verify_drafted(on_progress)
    if runtime.engine.requests > 1:
        _verify_batched(runtime, audits, prompts, on_progress)
    return report


def _engine_name(runtime: Runtime) -> str:
    engine, signature = runtime.engine, runtime.engine.signature
    drafts = () if runtime.exactness.drafts == "tree" else (_LIMITED[runtime.exactness.drafts],)
    return ", ".join((type(engine).__name__, engine.device, signature.dtype, signature.lowering, *drafts))


def _jobs(modes: int, prompts: Sequence[TokenizedPrompt]) -> list[AuditJob]:
    return [AuditJob(mode, prompt) for prompt in range(len(prompts)) for mode in range(modes)]


def _verify_batched(
    runtime: Runtime,
    audits: Sequence[_GroupAudit],
    prompts: Sequence[TokenizedPrompt],
    on_progress: Callable[[str], None],
) -> None:
    """Generate completions of all modes concurrently, so that they share engine calls, and verify them."""
    modes = [(group_audit, mode) for group_audit in audits for mode in group_audit.modes]
    jobs = _jobs(len(modes), prompts)
    on_progress(f"generating {len(jobs)} completions of all modes, {runtime.engine.requests} at a time")
    completions = generate(runtime, [mode for _, mode in modes], prompts, jobs, batched=True)
    on_progress("verifying them")
    for number, (group_audit, mode) in enumerate(modes):
        counts = group_audit.add_counts(mode, runtime.engine.requests)
        group_audit.verify(counts, completions[number :: len(modes)])


class _GroupAudit:
    """Compares the completions of one group of modes with those of its plain decoding."""

    def __init__(
        self,
        runtime: Runtime,
        group: ModeGroup,
        plain: Sequence[AuditCompletion],
        prompts: Sequence[TokenizedPrompt],
        report: AuditReport,
        max_tokens: int,
    ) -> None:
        self._runtime, self._group, self._plain, self._prompts = runtime, group, plain, prompts
        self._report, self._max_tokens = report, max_tokens
        self._rule: SelectionRule = selection_rule(group, runtime.bundle.manifest.tokens)
        self._noise = noise_of(report.noise)

    @property
    def modes(self) -> tuple[AuditMode, ...]:
        return (self._group.plain, *self._group.drafted)

    def verify_plain(self, on_progress: Callable[[str], None]) -> None:
        """Verify the plain completions by logits that are computed again."""
        on_progress(f"verifying {len(self._plain)} completions: {self._group.plain.name}")
        self.verify(self.add_counts(self._group.plain, reference=True), self._plain)

    def verify_drafted(self, on_progress: Callable[[str], None]) -> None:
        """Generate the completions of each other mode, one request at a time, and verify them."""
        for mode in self._group.drafted:
            on_progress(f"generating {len(self._prompts)} completions: {mode.name}")
            completions = generate(self._runtime, [mode], self._prompts, _jobs(1, self._prompts), batched=False)
            self.verify(self.add_counts(mode), completions)

    def add_counts(self, mode: AuditMode, requests: int = 1, reference: bool = False) -> ModeCounts:
        """A new row of the report."""
        counts = ModeCounts(mode.name, requests, reference)
        self._report.modes.append(counts)
        return counts

    def verify(self, counts: ModeCounts, completions: Sequence[AuditCompletion]) -> None:
        """Count completions, one per prompt in order, and report their mismatches."""
        for index, completion in enumerate(completions):
            prompt, plain = self._prompts[index], None if counts.reference else self._plain[index]
            found = self._mismatches(completion, plain, len(prompt.tokens) + self._max_tokens)
            counts.completions += 1
            counts.tokens += completion.tokens
            counts.steps += completion.steps
            counts.identical += not found and not completion.error
            graded = [
                grade_mismatch(
                    self._runtime.tokenizer,
                    counts,
                    index + 1,
                    prompt.line,
                    completion.threads.get(mismatch.path),
                    mismatch,
                    self._noise,
                )
                for mismatch in found
            ]
            counts.add(graded)
            self._report.mismatches.extend(graded)

    def _mismatches(
        self, completion: AuditCompletion, plain: AuditCompletion | None, limit: int
    ) -> list[TokenDifference]:
        if completion.error:
            return [TokenDifference((), 0, 0, None, None, np.nan, reason=completion.error)]
        expected: dict[Path, ThreadTokens] = {} if plain is None else plain.threads
        found = [] if plain is None or plain.error else unmatched_threads(completion.threads, expected)
        for path, thread in completion.threads.items():
            other = expected.get(path)
            if other is not None and other.tokens[: other.start] != thread.tokens[: thread.start]:
                other = None  # its parent differs: the two cannot be compared
            found += find_mismatches(self._runtime.engine, self._rule, thread, limit, other)
        return found
