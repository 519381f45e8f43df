"""Acceptance of a model's drafts by depth, along its own answers or along those of a data file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.draft_methods import (
    LOOKUP_KINDS,
    DraftAcceptance,
    DraftMethod,
    lookup_kind,
    measured_acceptance,
)
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE, TEMPLATE_FILE, TokenIds
from spaceport.runtime.bundle import read_correction, read_manifest
from spaceport.runtime.costs import relative_costs
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.planner import DraftPlanner, drafter_for
from spaceport.runtime.decode.sequence import TokenSelector, TokenSequence
from spaceport.runtime.decode.sequence_group import RequestStep, SequenceGroup, Statistics
from spaceport.runtime.decode.sources import USUAL_LOOKUP, Lookup
from spaceport.runtime.decode.step import step
from spaceport.runtime.decoding import DEFAULT_LOOKUP, Decoding
from spaceport.runtime.engine import PREFILL_ROWS
from spaceport.runtime.sampling.choice import Bans, Corrected, Greedy
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.chat_template import open_template
from spaceport.training.conversation_encoder import ConversationEncoder, conversation_encoder_with
from spaceport.training.conversations import TEXT, Conversation, Turn
from spaceport.training.samples import NO_PARENT, Prepared, Sample

TEXT_PROMPT = 32  # tokens of a plain text that count as its prompt, at most
_PRIOR = 10  # tokens that the initial rate of a kind of prompt-lookup token counts for


@dataclass(frozen=True)
class SourceOptions:
    """How models are opened."""

    backend: str = "auto"  # of bundles
    max_seq_len: int | None = None
    threads: int = 0
    remote_code: bool = False
    adapter: Path | None = None


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint or bundle with drafts, checked as far as possible without its weights."""

    path: Path
    drafts: DraftMethod
    open: Callable[[], AbstractContextManager[Runtime]]


def find_source(folder: Path, options: SourceOptions) -> ModelSource:
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


def _bundle(folder: Path, options: SourceOptions) -> ModelSource:
    if not (folder / MANIFEST_FILE).exists():
        raise InputFault(
            f"{folder}: expected a checkpoint (a folder with config.json) or a bundle (a folder with {MANIFEST_FILE})"
        )
    if options.adapter is not None:
        raise OptionFault(
            f"--adapter {options.adapter} with the bundle {folder}: expected a checkpoint with it; leave it out, or export its "
            "base model with `spaceport export --adapter`"
        )

    def opened() -> Runtime:
        return Runtime.open(
            folder,
            backend=options.backend,
            max_seq_len=options.max_seq_len,
            threads=options.threads,
            step_costs="standard",
        )

    return ModelSource(folder, read_manifest(folder).drafts, opened)


def _checkpoint(folder: Path, options: SourceOptions) -> ModelSource:
    if options.backend != "auto":
        raise OptionFault(
            f"--backend {options.backend} runs bundles, {folder} is a checkpoint and runs in PyTorch: leave --backend out, "
            "or export the checkpoint first"
        )
    # Imported for checkpoints only: bundles are measured where PyTorch is not installed.
    from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
    from spaceport.exporter.checkpoint_source import quiet_libraries
    from spaceport.verify.reference import checkpoint_runtime

    quiet_libraries()
    checkpoint = open_checkpoint(folder, TokenFlags(), options.remote_code, options.adapter)

    def opened() -> AbstractContextManager[Runtime]:
        return checkpoint_runtime(checkpoint, options.max_seq_len, options.threads)

    return ModelSource(folder, checkpoint.drafts, opened)


def conversation_encoder_for(runtime: Runtime) -> ConversationEncoder:
    """The tokenization of conversations for a runtime's model, the same as in training."""
    bundle = runtime.bundle

    def rendered(turns: Sequence[Turn], ask: bool) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        return open_template(bundle).render(messages, ask)

    has_template = TEMPLATE_FILE in bundle.manifest.files
    return conversation_encoder_with(runtime.tokenizer, rendered if has_template else None, bundle.manifest.tokens)


@dataclass(frozen=True)
class AnswerSegment:
    """Consecutive tokens of an answer, with everything before them."""

    prefix: tuple[int, ...]
    tokens: tuple[int, ...]
    child: bool = False  # the prefix ends with [Child]: a child thread, which may not fork


@dataclass(frozen=True)
class ReferenceAnswer:
    """The answers of one sample, and the prompt of the last one."""

    prompt: tuple[int, ...]  # everything before the last answer
    segments: tuple[AnswerSegment, ...]
    kind: str = ""  # of the conversation; empty if the file does not say


def reference_answers(
    prepared: Prepared, conversations: Sequence[Conversation], tokens: TokenIds
) -> list[ReferenceAnswer]:
    """The samples in file order; the first tokens of a plain text count as its prompt."""
    by_line = {conversation.line: conversation for conversation in conversations}
    answers = []
    for sample in sorted((*prepared.forked, *prepared.whole), key=lambda sample: sample.line):
        segments, conversation = segments_of(sample, tokens), by_line[sample.line]
        if conversation.turns[0].role == TEXT:
            segments = [_with_prompt(segment) for segment in segments]
        roots = [segment for segment in segments if not segment.child]
        answers.append(ReferenceAnswer(roots[-1].prefix, tuple(segments), conversation.kind))
    return answers


def segments_of(sample: Sample, tokens: TokenIds) -> list[AnswerSegment]:
    """The chains of learned tokens: each begins after a token that is not learned (the prompt's last, or [Child])."""
    members: dict[int, list[int]] = {}  # index of a segment's first token -> indices of all its tokens
    first: dict[int, int] = {}  # index of a token -> index of its segment's first token
    for index in np.flatnonzero(sample.learned).tolist():
        first[index] = first.get(int(sample.parents[index]), index)
        members.setdefault(first[index], []).append(index)
    segments = []
    for start, indices in members.items():
        before = _path(sample, int(sample.parents[start]))
        child = tokens.child is not None and int(sample.ids[before[-1]]) == tokens.child
        segments.append(AnswerSegment(tuple(sample.ids[before].tolist()), tuple(sample.ids[indices].tolist()), child))
    return segments


def _path(sample: Sample, index: int) -> list[int]:
    """The indices from the first token to this one, parent by parent."""
    path = []
    while index != NO_PARENT:
        path.append(index)
        index = int(sample.parents[index])
    return path[::-1]


def _with_prompt(text: AnswerSegment) -> AnswerSegment:
    """A plain text whose first tokens, at most half of them, are its prompt."""
    whole = (*text.prefix, *text.tokens)
    cut = max(len(text.prefix), min(TEXT_PROMPT, len(whole) // 2))
    return AnswerSegment(whole[:cut], whole[cut:])


@dataclass(frozen=True)
class _Forced:
    """Selects the tokens of a known text, whatever the logits; its candidates are those of another selector."""

    inner: TokenSelector
    text: Sequence[int]

    def token(self, logits: NDArray[np.float32], thread: TokenSequence, ahead: Sequence[int]) -> int:
        return self.text[min(len(thread.tokens) + len(ahead), len(self.text) - 1)]

    def candidates(
        self, logits: NDArray[np.float32], thread: TokenSequence, position: int, most: int
    ) -> tuple[Candidates, ...]:
        return self.inner.candidates(logits, thread, position, most)


def along_segment(runtime: Runtime, segment: AnswerSegment, slots: int) -> Statistics:
    """The statistics of generating a known text with chains of mask slots or heads."""
    manifest, engine = runtime.bundle.manifest, runtime.engine
    tokens = manifest.tokens
    selector: TokenSelector = Greedy(
        Bans(frozenset(tokens.forbidden), tokens.fork, tokens.child, int(not segment.child))
    )
    if (correction := read_correction(runtime.bundle)) is not None:
        selector = Corrected(selector, correction)
    text = (*segment.prefix, *segment.tokens)
    config = Decoding(mask_slots=slots, draft="chain").draft_config(manifest.drafts)
    sequences = SequenceGroup(
        prompt=segment.prefix,
        capacity=engine.capacity,
        lowering=engine.signature.lowering,
        tokens=replace(tokens, fork=None, child=None),  # one thread
        selector=_Forced(selector, text),
        max_length=len(text),
        max_total=len(segment.tokens),
        draft_config=config,
        drafter=drafter_for(config, DraftPlanner(relative_costs(0.0))),
        max_rows=engine.rows,
    )
    while sequences.live:
        step(engine, [RequestStep(sequences, 0, min(PREFILL_ROWS, engine.rows))])
    return sequences.statistics


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
        for counts, more in (
            (self.drafted, statistics.drafted_by_depth),
            (self.accepted, statistics.accepted_by_depth),
        ):
            counts += [0] * (len(more) - len(counts))
            for depth, count in enumerate(more):
                counts[depth] += count

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
    lookup: LookupTally = field(default_factory=LookupTally)  # along own answers

    def add(self, kind: str, statistics: Statistics) -> None:
        """Count an answer to a prompt of this kind."""
        self.all.add(statistics)
        if kind:
            self.kinds.setdefault(kind, Tally()).add(statistics)

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON data."""
        return {**self.all.as_dict(), "kinds": {kind: tally.as_dict() for kind, tally in self.kinds.items()}}

    def as_draft_acceptance(self, data: str, day: date) -> DraftAcceptance:
        """The rates as a checkpoint stores them."""
        return measured_acceptance(self.all.acceptance, self.all.tokens, data, day, self.lookup.rates)


def measure(runtime: Runtime, samples: Iterable[ReferenceAnswer], max_tokens: int | None) -> MeasuredDrafts:
    """Acceptance along the greedy answers of up to `max_tokens` that the model generates; None: along those of the samples."""
    slots = runtime.bundle.manifest.drafts.max_tokens
    measured = MeasuredDrafts()
    for sample in samples:
        if max_tokens is None:
            for segment in sample.segments:
                measured.add(sample.kind, along_segment(runtime, segment, slots))
            continue
        room = min(max_tokens, runtime.max_seq_len - len(sample.prompt))
        completion = runtime.generate(sample.prompt, Decoding(max_tokens=room, mask_slots=slots, draft="chain"))
        measured.add(sample.kind, completion.statistics)
        measured.lookup.add(sample.prompt, completion.threads[0].tokens)
    return measured
