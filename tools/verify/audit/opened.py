"""Opened: a bundle opened on one engine to be audited over a file of prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.session import Runtime
from spaceport.tools.verify.audit.audit import audit
from spaceport.tools.verify.audit.audit_report import AuditReport
from spaceport.tools.verify.audit.prompts import questions, read_prompts

MOST_REQUESTS = 4  # texts at a time, unless told otherwise


@dataclass(frozen=True)
class AuditOptions:
    """How much is audited, and with how much room."""

    max_tokens: int = 128  # of each text
    limit: int | None = None  # prompts; none: all of the file
    max_seq_len: int | None = None
    max_requests: int | None = None  # texts at a time; none: 4, or as many as the engines of the bundle take
    threads: int = 0
    trust_engines: bool = False

    def __post_init__(self) -> None:
        for name, given in (("--max-tokens", self.max_tokens), ("--limit", self.limit)):
            if given is not None and given < 1:
                raise OptionFault(f"{name} is {given}: expected at least 1")


def audit_bundle(
    bundle: Path, prompts: Path, backend: str, options: AuditOptions, stage: Callable[[str], None]
) -> AuditReport:
    """What drafts change in the texts of a bundle on a backend."""
    asked = read_prompts(prompts)[: options.limit]
    stage("opening the bundle")
    room = options.max_requests
    with Runtime.open(
        bundle,
        backend=backend,
        max_seq_len=options.max_seq_len,
        max_requests=requests_for(read_manifest(bundle)) if room is None else room,
        threads=options.threads,
        trust_engines=options.trust_engines,
        step_costs="free",  # a draft that is not fed shows no fault
    ) as runtime:
        for note in runtime.notes:
            stage(note)
        return audit(runtime, questions(runtime, asked, options.max_tokens, prompts), options.max_tokens, stage)


def requests_for(manifest: Manifest) -> int:
    """As many texts at a time as an audit is made of, if the engines of a bundle take so many.

    With more no engine of the bundle would be opened, and another would be audited in its place.
    """
    return min(MOST_REQUESTS, max((record.requests for record in manifest.engines.values()), default=MOST_REQUESTS))
