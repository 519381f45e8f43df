"""Acceptance of a model's drafts by depth, along its own answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from spaceport.graphs.contract.draft_methods import (
    LOOKUP_KINDS,
    DraftMethod,
    lookup_kind,
)
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.decode.sources import USUAL_LOOKUP, Lookup
from spaceport.runtime.decoding import DEFAULT_LOOKUP, Decoding
from spaceport.runtime.sampling.option_fields import check_options, option
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.verify.prompts import AuditPrompt, tokens_of

TEXT_PROMPT = 32  # tokens of a plain text that are its prompt, at most
_PRIOR = 10  # tokens that the initial rate of a kind of prompt-lookup token counts for


@dataclass(frozen=True)
class AcceptanceOptions:
    """Which answers are measured, and how models are opened."""

    limit: int | None = option(None, "Use the first N prompts of DATA only.", 1)
    max_tokens: int = option(256, "Maximum number of tokens per answer.", 1)
    temperature: float = option(0.0, "Sampling temperature; 0 = greedy answers.", 0, 100)
    backend: str = "auto"  # of bundles
    max_seq_len: int | None = None
    threads: int = 0
    trust_remote_code: bool = False
    adapter: Path | None = None

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint or bundle with drafts, checked as far as possible without its weights."""

    path: Path
    drafts: DraftMethod
    open: Callable[[], AbstractContextManager[Runtime]]


def find_source(folder: Path, options: AcceptanceOptions) -> ModelSource:
    """The bundle or checkpoint in a folder: a bundle runs on a backend, a checkpoint in PyTorch."""
    source = _checkpoint(folder, options) if is_checkpoint(folder) else _bundle(folder, options)
    if not source.drafts.max_tokens:
        raise InputFault(
            f"{folder}: has no mask token and no heads, so there are no draft tokens to measure: expected a checkpoint "
            "tuned with mask slots (`spaceport tune`), a base model with --adapter, or a bundle exported from one"
        )
    return source


def is_checkpoint(folder: Path) -> bool:
    """Whether a path is a checkpoint folder or GGUF file, not a bundle."""
    if folder.suffix.lower() == ".gguf":
        return not folder.is_dir()
    return (folder / "config.json").exists() and not (folder / MANIFEST_FILE).exists()


def _bundle(folder: Path, options: AcceptanceOptions) -> ModelSource:
    if not (folder / MANIFEST_FILE).exists():
        raise InputFault(
            f"{folder}: expected a checkpoint (a folder with config.json) or a bundle (a folder with {MANIFEST_FILE})"
        )
    if options.adapter is not None:
        raise OptionFault(
            f"--adapter {options.adapter} with the bundle {folder}: expected a checkpoint with it; leave it out, or export its "
            "base model with `spaceport export --adapter`"
        )
    opened = partial(
        Runtime.open,
        folder,
        backend=options.backend,
        max_seq_len=options.max_seq_len,
        threads=options.threads,
        step_costs="standard",
    )
    return ModelSource(folder, read_manifest(folder).drafts, opened)


def _checkpoint(folder: Path, options: AcceptanceOptions) -> ModelSource:
    if options.backend != "auto":
        raise OptionFault(
            f"--backend {options.backend} runs bundles, {folder} is a checkpoint and runs in PyTorch: leave --backend out, "
            "or export the checkpoint first"
        )
    # Imported for checkpoints only: bundles are measured where PyTorch is not installed.
    from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint, quiet_libraries
    from spaceport.verify.reference import checkpoint_runtime

    quiet_libraries()
    checkpoint = open_checkpoint(folder, TokenFlags(), options.trust_remote_code, options.adapter)
    opened = partial(checkpoint_runtime, checkpoint, options.max_seq_len, options.threads)
    return ModelSource(folder, checkpoint.drafts, opened)


@dataclass(frozen=True)
class DraftPrompt:
    """A prompt whose answer is generated with drafts."""

    tokens: tuple[int, ...]
    kind: str = ""  # of what it asks for; empty if the file does not say


def draft_prompts(runtime: Runtime, prompts: Sequence[AuditPrompt], file: Path) -> list[DraftPrompt]:
    """The prompts that leave space for an answer, at least one; of a plain text, its first tokens."""
    found = []
    for prompt in prompts:
        tokens = tokens_of(runtime, prompt, file)
        if isinstance(prompt.prompt, str):
            tokens = tokens[: max(1, min(TEXT_PROMPT, len(tokens) // 2))]
        if len(tokens) < runtime.max_seq_len:
            found.append(DraftPrompt(tuple(tokens), prompt.kind))
    if not found:
        raise InputFault(f"{file}: none of its {len(prompts)} prompts has less than {runtime.max_seq_len} tokens")
    return found


def _sums(counts: Sequence[int], more: Sequence[int]) -> list[int]:
    return [one + other for one, other in zip_longest(counts, more, fillvalue=0)]


@dataclass
class Tally:
    """Draft tokens, accepted ones and steps along answers."""

    answers: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: list[int] = field(default_factory=list)  # by depth
    accepted: list[int] = field(default_factory=list)  # by depth

    def add(self, statistics: Statistics) -> None:
        """Count an answer."""
        self.answers += 1
        self.tokens += statistics.tokens
        self.steps += statistics.steps
        self.drafted = _sums(self.drafted, statistics.drafted_by_depth)
        self.accepted = _sums(self.accepted, statistics.accepted_by_depth)

    @property
    def acceptance(self) -> list[float | None]:
        """Share of accepted draft tokens by depth."""
        counts = zip(self.accepted, self.drafted, strict=True)
        return [accepted / drafted if drafted else None for accepted, drafted in counts]

    @property
    def tokens_per_step(self) -> float | None:
        return self.tokens / self.steps if self.steps else None

    def as_dict(self) -> dict[str, Any]:
        """The counts and shares as JSON data."""
        return {**asdict(self), "acceptance": self.acceptance, "tokens_per_step": self.tokens_per_step}


@dataclass
class LookupTally:
    """Counts of prompt-lookup tokens along answers, by kind of match."""

    tokens: list[int] = field(default_factory=lambda: [0] * LOOKUP_KINDS)  # behind accepted ones
    accepted: list[int] = field(default_factory=lambda: [0] * LOOKUP_KINDS)  # of these

    def add(self, prefix: Sequence[int], answer: Sequence[int], most: int = DEFAULT_LOOKUP) -> None:
        """Count the steps that generate an answer with up to `most` tokens of prompt lookup and no other drafts."""
        lookup, text, copied = Lookup(), list(prefix), 0
        position = 0
        while position < len(answer):
            draft, equal = lookup.following(text, most)
            written = answer[position : position + len(draft) + 1]
            right = 0
            for depth, (token, expected) in enumerate(zip(draft, written, strict=False)):
                kind = lookup_kind(equal + depth, copied + depth)
                self.tokens[kind] += 1
                if token != expected:
                    break
                self.accepted[kind] += 1
                right += 1
            whole = right == min(len(draft), len(written))
            copied = copied + right if whole and right else 0
            text += written[: right + 1]
            position += right + 1

    @property
    def rates(self) -> list[float]:
        """Rates by kind; the runtime's initial values count for a few tokens, since rare kinds would have them by chance."""
        counts = zip(self.accepted, self.tokens, USUAL_LOOKUP, strict=True)
        return [(good + _PRIOR * initial) / (count + _PRIOR) for good, count, initial in counts]


@dataclass
class MeasuredDrafts:
    """The acceptance of a model's drafts: over all answers, and by kind of prompt."""

    all: Tally = field(default_factory=Tally)
    kinds: dict[str, Tally] = field(default_factory=dict)
    lookup: LookupTally = field(default_factory=LookupTally)

    def add(self, kind: str, statistics: Statistics) -> None:
        """Count an answer to a prompt of this kind."""
        self.all.add(statistics)
        if kind:
            self.kinds.setdefault(kind, Tally()).add(statistics)

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON data."""
        return {**self.all.as_dict(), "kinds": {kind: tally.as_dict() for kind, tally in self.kinds.items()}}


def measure(
    runtime: Runtime, prompts: Iterable[DraftPrompt], max_tokens: int, temperature: float = 0.0
) -> MeasuredDrafts:
    """Acceptance along the answers of up to `max_tokens` that the model generates, in chains of all its drafts."""
    slots, sampling = runtime.bundle.manifest.drafts.max_tokens, Sampling(temperature=temperature, seed=0)
    measured = MeasuredDrafts()
    for prompt in prompts:
        room = min(max_tokens, runtime.max_seq_len - len(prompt.tokens))
        decoding = Decoding(max_tokens=room, mask_slots=slots, draft="chain", sampling=sampling)
        completion = runtime.generate(prompt.tokens, decoding)
        measured.add(prompt.kind, completion.statistics)
        measured.lookup.add(prompt.tokens, completion.threads[0].tokens)
    return measured
