"""Check outcome: the report on a bundle's backends, with the error of quantization and the audits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.bundle import Bundle
from spaceport.tools.verify.audit.audit_report import AuditReport
from spaceport.tools.verify.audit.bundle_audit import AuditOptions, audit_bundle
from spaceport.tools.verify.audit.prompts import read_prompts
from spaceport.tools.verify.check.check import CheckReport, check
from spaceport.tools.verify.check.check_options import CheckOptions
from spaceport.tools.verify.check.quantization import Agreement, measure_quantization


@dataclass(frozen=True)
class CheckOutcome:
    """A report, and what was measured beside it."""

    report: CheckReport
    quantization: Agreement | None  # None: nothing is quantized, or there is no checkpoint
    audits: dict[str, AuditReport]  # by backend

    @property
    def passed(self) -> bool:
        return self.report.passed and all(audit.passed for audit in self.audits.values())

    def as_dict(self) -> dict[str, Any]:
        """The outcome as JSON-compatible data."""
        found: dict[str, Any] = {}
        if self.audits:
            found["audits"] = {backend: audit.as_dict() for backend, audit in self.audits.items()}
        if self.quantization is not None:
            found["quantization"] = self.quantization.as_dict()
        return {**self.report.as_dict(), **found}


def audits_of(
    bundle: Bundle, report: CheckReport, options: CheckOptions, prompts: Path, stage: Callable[[str], None]
) -> dict[str, AuditReport]:
    """Audit reports of each backend that was compared."""
    settings = AuditOptions(
        threads=options.threads,
        trust_engines=options.trust_engines,
        allow_links=bundle.files is not None and bundle.files.links,
        require_signature=options.require_signature,
    )
    compared = [backend for backend in options.backends or BACKENDS if backend not in report.not_compared]
    return {backend: audit_bundle(bundle.path, prompts, backend, settings, stage) for backend in compared}


def compare(bundle: Bundle, options: CheckOptions, prompts: Path | None, stage: Callable[[str], None]) -> CheckOutcome:
    """The report on a bundle's backends, with the error of quantization and the audits."""
    if prompts is not None:
        read_prompts(prompts)  # raises for a mistake in the file before minutes of work
    report = check(bundle, options, stage)
    quantization = None
    if options.checkpoint is not None:
        quantization = measure_quantization(
            bundle, options.checkpoint, options.remote_code, options.seed, options.adapter
        )
    audits = {} if prompts is None else audits_of(bundle, report, options, prompts, stage)
    return CheckOutcome(report, quantization, audits)
