"""Every draft mode of a bundle compared with plain decoding over a set of prompts, each token verified by one-row logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spaceport.graphs.contract.draft_methods import PREDICTOR_NAMES, drafts_in_words
from spaceport.graphs.contract.exactness import Exactness
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.comparison import ThreadTokens, TokenDifference, thread_tokens_of
from spaceport.runtime.decode.sequence import NotANumber
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import seq_len
from spaceport.runtime.sampling.option_fields import check_options, option
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.stream import Stream
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.transcript import Path as ThreadPath
from spaceport.verify.plain_logits import (
    Noise,
    SelectionRule,
    find_mismatches,
    measure,
    noise_of,
    selection_rule,
    unmatched_threads,
)
from spaceport.verify.prompts import TokenizedPrompt, read_prompts, tokenize_prompts

DEFAULT_REQUESTS = 4  # concurrent requests
SEED = 1
_LOOKUP = 6  # tokens; the default prompt lookup of draft trees
_QUEUED = 64  # requests that wait while others run, so that requests start and end at different steps
_CONTEXT = 12  # tokens before a mismatch that are shown
_BOTH_TOKENS = 2  # noise may lower one token's logit and raise the other's


@dataclass(frozen=True)
class AuditMode:
    """A named decoding mode."""

    name: str
    decoding: Decoding


@dataclass(frozen=True)
class ModeGroup:
    """Modes that must all generate the tokens of the same plain decoding, which feeds one row per step."""

    plain: AuditMode
    drafted: tuple[AuditMode, ...]


def groups_for(manifest: Manifest, exactness: Exactness, max_tokens: int) -> list[ModeGroup]:
    """Every mode that a bundle supports: greedy, sampled with a seed, and with forked threads if it forks.

    Concurrent threads are left out if they are not the default. Drafts are compared in any case: users may request them.
    """
    mask_slots = manifest.drafts.max_tokens
    chains = dict.fromkeys((mask_slots, 1)) if mask_slots else {}
    plain = Decoding(max_tokens=max_tokens, fork=False).without_drafts()
    sampled = replace(plain, sampling=Sampling(temperature=1.0, seed=SEED))
    drafted = (*(_chain(plain, k) for k in chains), _default(plain, mask_slots))
    groups = [
        ModeGroup(AuditMode("plain", plain), drafted),
        ModeGroup(AuditMode("plain, sampled", sampled), (_default(sampled, mask_slots, ", sampled"),)),
    ]
    if manifest.tokens.fork is not None:
        sequential = replace(plain, fork=True, max_threads=1)  # one thread after the other: one row per step
        concurrent = replace(sequential, max_threads=Decoding().threads(exactness.allows_drafts))
        undrafted = (AuditMode("plain, forked", concurrent),) if concurrent != sequential else ()
        suffix = ", forked" if undrafted else ", forked, sequential"
        forked = (_chain(concurrent, k, suffix) for k in chains if k > 1)
        drafted = (*undrafted, *forked, _default(concurrent, mask_slots, suffix))
        groups.append(ModeGroup(AuditMode("plain, forked, sequential", sequential), drafted))
    return groups


def _chain(plain: Decoding, k: int, suffix: str = "") -> AuditMode:
    """Drafts of `k` tokens from mask slots alone."""
    return AuditMode(f"chain k = {k}{suffix}", replace(plain, draft="chain", lookup=None, mask_slots=k))


def _default(plain: Decoding, mask_slots: int, suffix: str = "") -> AuditMode:
    """Drafts from mask slots and prompt lookup, the runtime's default."""
    name = "tree with lookup" if mask_slots else "lookup"
    return AuditMode(f"{name}{suffix}", replace(plain, draft="tree", lookup=_LOOKUP, mask_slots=mask_slots))


@dataclass(frozen=True)
class AuditCompletion:
    """The token sequences of a completion's threads."""

    threads: dict[ThreadPath, ThreadTokens]
    steps: int
    error: str = ""  # why there is no completion

    @property
    def tokens(self) -> int:
        """Generated tokens of all threads, end tokens included."""
        return sum(thread.generated for thread in self.threads.values())


def generate(
    runtime: Runtime, jobs: Sequence[tuple[TokenizedPrompt, AuditMode]], batched: bool = False
) -> list[AuditCompletion]:
    """The completions of prompts in a mode, one request at a time or, `batched`, as many as the engine takes.

    Batched steps are wider, and shorter plans are padded. No request is live when this returns.
    """
    count = runtime.engine.requests + _QUEUED if batched else 1
    child = runtime.bundle.manifest.tokens.child
    completions: list[AuditCompletion] = []
    for first in range(0, len(jobs), count):
        streams = [runtime.stream(prompt.tokens, mode.decoding) for prompt, mode in jobs[first : first + count]]
        completions.extend(_completion(stream, child) for stream in streams)
    if any(completion.error for completion in completions):
        for request in range(runtime.engine.requests):
            runtime.engine.clear(request)
    return completions


def _completion(stream: Stream, child: int | None) -> AuditCompletion:
    try:
        completion = stream.completion()
    except NotANumber as error:
        return AuditCompletion({}, stream.statistics.steps, str(error))
    return AuditCompletion(thread_tokens_of(completion, child), completion.statistics.steps)


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

    def add(self, mismatch: TokenDifference) -> None:
        """Count a mismatch."""
        if mismatch.near_tie:
            self.near_ties += 1
            self.margin = max(self.margin or 0.0, mismatch.margin)
        else:
            self.faults += 1


@dataclass
class AuditReport:
    """The result of an audit on one engine."""

    engine: str
    method: str  # by which the bundle drafts
    drafts: str  # such as "3 mask slots"
    noise: list[Noise]  # by step width
    modes: list[ModeCounts] = field(default_factory=list)
    mismatches: list[GradedMismatch] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def faults(self) -> int:
        """Number of faults: wrong tokens, and step widths with more noise than rounding explains."""
        return sum(counts.faults for counts in self.modes) + sum(not noise.passed for noise in self.noise)

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
            "noise_by_width": [noise.as_dict() for noise in self.noise],
            "modes": [asdict(counts) for counts in self.modes],
            "mismatches": [graded.as_dict() for graded in self.mismatches],
        }


def _one_digit(number: float) -> str:
    """A number with one significant digit, such as 2e-05."""
    return f"{number:.0e}" if number else "0"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def audit(
    runtime: Runtime,
    prompts: Sequence[TokenizedPrompt],
    max_tokens: int,
    on_progress: Callable[[str], None] = lambda _: None,
) -> AuditReport:
    """What drafts, forked threads and batching change in the completions of these prompts.

    No other request may run on the runtime meanwhile: the audit also feeds its engine directly.
    """
    manifest, count = runtime.bundle.manifest, len(prompts)
    plain: list[tuple[ModeGroup, list[AuditCompletion]]] = []
    for group in groups_for(manifest, runtime.exactness, max_tokens):
        on_progress(f"generating {count} completions: {group.plain.name}")
        plain.append((group, generate(runtime, [(prompt, group.plain) for prompt in prompts])))
    on_progress("measuring the noise of other step widths")
    threads = [completion.threads[()] for completion in plain[0][1] if not completion.error]
    noise = measure(runtime.engine, threads, manifest.native)
    drafts = drafts_in_words(manifest.drafts.max_tokens, PREDICTOR_NAMES[manifest.drafts.predictor])
    verifier = _Verifier(
        runtime, prompts, max_tokens, AuditReport(_engine_name(runtime), manifest.drafts.name, drafts, noise)
    )
    for group, completions in plain:
        on_progress(f"verifying {count} completions: {group.plain.name}")
        verifier.verify(group.plain, completions)
    for group, completions in plain:
        for mode in group.drafted:
            on_progress(f"generating {count} completions: {mode.name}")
            verifier.verify(mode, generate(runtime, [(prompt, mode) for prompt in prompts]), completions)
    if runtime.engine.requests > 1:  # all modes concurrently, so that they share engine calls
        modes = [(mode, completions) for group, completions in plain for mode in (group.plain, *group.drafted)]
        jobs = [(prompt, mode) for prompt in prompts for mode, _ in modes]
        on_progress(f"generating {len(jobs)} completions of all modes, {runtime.engine.requests} at a time")
        batched = generate(runtime, jobs, batched=True)
        on_progress("verifying them")
        for number, (mode, completions) in enumerate(modes):
            verifier.verify(mode, batched[number :: len(modes)], completions, runtime.engine.requests)
    return verifier.report


def _engine_name(runtime: Runtime) -> str:
    engine, signature = runtime.engine, runtime.engine.signature
    drafts = () if runtime.exactness.allows_drafts else ("drafts are not exact",)
    return ", ".join((type(engine).__name__, engine.device, signature.dtype, signature.lowering, *drafts))


@dataclass(frozen=True)
class _Verifier:
    """Verifies the completions of one mode after the other, and reports their mismatches."""

    runtime: Runtime
    prompts: Sequence[TokenizedPrompt]
    max_tokens: int
    report: AuditReport

    def verify(
        self,
        mode: AuditMode,
        completions: Sequence[AuditCompletion],
        plain: Sequence[AuditCompletion] | None = None,
        requests: int = 1,
    ) -> None:
        """Verify completions, one per prompt in order, by those of plain decoding, or plain ones by their logits alone."""
        counts = ModeCounts(mode.name, requests, reference=plain is None)
        self.report.modes.append(counts)
        rule = selection_rule(mode.decoding, self.runtime.bundle.manifest.tokens)
        for index, completion in enumerate(completions):
            limit = len(self.prompts[index].tokens) + self.max_tokens
            mismatches = self._mismatches(rule, completion, None if plain is None else plain[index], limit)
            counts.completions += 1
            counts.tokens += completion.tokens
            counts.steps += completion.steps
            counts.identical += not mismatches
            for mismatch in mismatches:
                graded = self._graded(counts, index, completion, mismatch)
                counts.add(graded.mismatch)
                self.report.mismatches.append(graded)

    def _mismatches(
        self, rule: SelectionRule, completion: AuditCompletion, plain: AuditCompletion | None, limit: int
    ) -> list[TokenDifference]:
        if completion.error:
            return [TokenDifference((), 0, 0, None, None, np.nan, reason=completion.error)]
        expected: dict[ThreadPath, ThreadTokens] = {} if plain is None else plain.threads
        mismatches = [] if plain is None or plain.error else unmatched_threads(completion.threads, expected)
        for path, thread in completion.threads.items():
            other = expected.get(path)
            if other is not None and other.tokens[: other.start] != thread.tokens[: thread.start]:
                other = None  # its parent differs: the two cannot be compared
            mismatches += find_mismatches(self.runtime.engine, rule, thread, limit, other)
        return mismatches

    def _graded(
        self, counts: ModeCounts, index: int, completion: AuditCompletion, mismatch: TokenDifference
    ) -> GradedMismatch:
        """A mismatch with what the noise allows, and its text."""

        def text(tokens: Sequence[int]) -> str:
            return str(self.runtime.tokenizer.decode(list(tokens), skip_special_tokens=False))

        mismatch = replace(mismatch, allowed=_BOTH_TOKENS * noise_of(self.report.noise))
        thread, position = completion.threads.get(mismatch.path), mismatch.position
        before = () if thread is None else thread.tokens[max(0, position - _CONTEXT) : position]
        expected, found = ("" if token is None else text([token]) for token in (mismatch.expected, mismatch.found))
        line = self.prompts[index].line
        return GradedMismatch(counts.mode, counts.requests, index + 1, line, mismatch, text(before), expected, found)


@dataclass(frozen=True)
class AuditOptions:
    """What is audited, and how the engine is opened."""

    max_tokens: int = option(128, "Maximum number of generated tokens per prompt.", 1)
    limit: int | None = option(None, "Use the first N prompts only.", 1)
    max_requests: int | None = option(
        None,
        "Concurrent requests of the batched runs.",
        unset=f"{DEFAULT_REQUESTS}, or the maximum of the bundle's engines",
    )
    max_seq_len: int | None = None
    backend: str = "auto"
    threads: int = 0
    trust_engines: bool = False
    allow_links: bool = False  # whether files of the bundle may be links

    def __post_init__(self) -> None:
        check_options(self)


def audit_bundles(
    bundles: Sequence[Path], prompt_file: Path, options: AuditOptions, on_progress: Callable[[str], None]
) -> dict[Path, AuditReport]:
    """The audits of bundles over the same prompts, by bundle; all manifests are checked before the first audit."""
    prompts = read_prompts(prompt_file)[: options.limit]
    manifests = {bundle: read_manifest(bundle, options.allow_links) for bundle in bundles}
    for manifest in manifests.values():
        seq_len(manifest, options.max_seq_len)
    reports, requests = {}, options.max_requests
    for bundle, manifest in manifests.items():
        on_progress(f"auditing {bundle}")
        with Runtime.open(
            bundle,
            backend=options.backend,
            max_seq_len=options.max_seq_len,
            max_requests=requests_for(manifest) if requests is None else requests,
            threads=options.threads,
            trust_engines=options.trust_engines,
            allow_links=options.allow_links,
            step_costs="free",  # always draft: a draft that is skipped shows no fault
        ) as runtime:
            for note in runtime.notes:
                on_progress(note)
            tokenized = tokenize_prompts(runtime, prompts, options.max_tokens, prompt_file)
            reports[bundle] = audit(runtime, tokenized, options.max_tokens, on_progress)
    return reports


def requests_for(manifest: Manifest, wanted: int = DEFAULT_REQUESTS) -> int:
    """The number of concurrent requests, or fewer if the bundle's engines take fewer.

    With more requests than they take, the bundle would be opened on another engine, and that one would be audited.
    """
    return min(wanted, max((record.requests for record in manifest.engines.values()), default=wanted))
