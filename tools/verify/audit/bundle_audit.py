"""Bundle audit: a bundle opened on one engine and audited over a prompt file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.engine import seq_len
from spaceport.runtime.session import Runtime
from spaceport.tools.verify.audit.audit import audit
from spaceport.tools.verify.audit.audit_report import AuditReport
from spaceport.tools.verify.audit.prompts import read_prompts, tokenize_prompts

DEFAULT_REQUESTS = 4  # concurrent requests


@dataclass(frozen=True)
class AuditOptions:
    """What is audited, and how the engine is opened."""

    max_tokens: int = 128  # per completion
    limit: int | None = None  # number of prompts; None: all of the file
    max_seq_len: int | None = None
    max_requests: int | None = None  # concurrent requests; None: 4, or as many as the engines of the bundle take
    threads: int = 0
    trust_engines: bool = False
    allow_links: bool = False  # whether files of the bundle may be links
    require_signature: Path | None = None  # public key file of the signature that the bundle must have

    def __post_init__(self) -> None:
        for name, given in (("--max-tokens", self.max_tokens), ("--limit", self.limit)):
            if given is not None and given < 1:
                raise OptionFault(f"{name} is {given}: expected at least 1")


def audit_bundle(
    bundle: Path, prompt_file: Path, backend: str, options: AuditOptions, on_progress: Callable[[str], None]
) -> AuditReport:
    """The audit of a bundle on a backend over a prompt file."""
    prompts = read_prompts(prompt_file)[: options.limit]
    on_progress("opening the bundle")
    requests, key = options.max_requests, options.require_signature
    with Runtime.open(
        bundle,
        backend=backend,
        max_seq_len=options.max_seq_len,
        max_requests=requests_for(read_manifest(bundle, options.allow_links, key)) if requests is None else requests,
        threads=options.threads,
        trust_engines=options.trust_engines,
        allow_links=options.allow_links,
        require_signature=key,
        step_costs="free",  # always draft: a draft that is skipped shows no fault
    ) as runtime:
        for note in runtime.notes:
            on_progress(note)
        tokenized = tokenize_prompts(runtime, prompts, options.max_tokens, prompt_file)
        return audit(runtime, tokenized, options.max_tokens, on_progress)


def audit_bundles(
    bundles: Sequence[Path], prompt_file: Path, backend: str, options: AuditOptions, on_progress: Callable[[str], None]
) -> dict[Path, AuditReport]:
    """The audits of several bundles over the same prompts, by bundle; all manifests are checked before the first audit."""
    read_prompts(prompt_file)
    for bundle in bundles:
        seq_len(read_manifest(bundle, options.allow_links, options.require_signature), options.max_seq_len)
    found = {}
    for bundle in bundles:
        on_progress(f"auditing {bundle}")
        found[bundle] = audit_bundle(bundle, prompt_file, backend, options, on_progress)
    return found


def requests_for(manifest: Manifest) -> int:
    """The default number of concurrent requests, or fewer if the bundle's engines take fewer.

    With more requests than they take, the bundle would be opened on another engine, and that one would be audited.
    """
    most = max((record.requests for record in manifest.engines.values()), default=DEFAULT_REQUESTS)
    return min(DEFAULT_REQUESTS, most)
