"""Acceptance of a model's drafts: prediction accuracy and tokens per step, on generated and on reference answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.draft_methods import (
    LOOKUP_KINDS,
    PREDICTOR_NAMES,
    CorrectionTables,
    DraftAcceptance,
    drafts_in_words,
    lookup_kind,
    measured_acceptance,
)
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE, TEMPLATE_FILE
from spaceport.runtime.bundle import read_correction, read_manifest
from spaceport.runtime.decode.sources import USUAL_LOOKUP, Lookup
from spaceport.runtime.decoding import DEFAULT_LOOKUP, Decoding
from spaceport.runtime.engine import seq_len
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.chat_template import open_template
from spaceport.tools.tune.conversation_encoder import ConversationEncoder, conversation_encoder_with
from spaceport.tools.tune.conversations import Turn
from spaceport.tools.verify.answers import (
    AnswerSegment,
    ReferenceAnswer,
    generate_answer,
    generate_drafted,
    predict_segment,
)

_PRIOR = 10  # tokens that the initial rate of a kind of prompt-lookup token counts for


def correct_predictions(predicted: NDArray[np.int64], answer: Sequence[int]) -> NDArray[np.bool_]:
    """Which predictions are correct: indices of the answer x slots; slot i at index n predicts token n + i."""
    correct = np.zeros(predicted.shape, np.bool_)
    for slot in range(min(predicted.shape[1], len(answer))):
        count = len(answer) - slot
        correct[:count, slot] = predicted[:count, slot] == np.array(answer[slot:], np.int64)
    return correct


def chain_starts(correct: NDArray[np.bool_], mask_slots: int) -> list[int]:
    """Index of the last known token in each step that generates an answer with this number of mask slots, after the first.

    The first step yields one token. Each later step verifies the draft tokens that the mask slots predicted one step
    earlier; it yields the leading correct ones and one more token.
    """
    accepted = _accepted(correct, mask_slots).sum(axis=1)
    starts, last = [], 0  # last: index of the last generated token
    while last < len(correct) - 1:
        starts.append(last)
        last += int(accepted[last]) + 1
    return starts


def count_steps(correct: NDArray[np.bool_], mask_slots: int) -> int:
    """Steps that the runtime takes to generate an answer with this number of mask slots."""
    return 1 + len(chain_starts(correct, mask_slots))


def _accepted(correct: NDArray[np.bool_], mask_slots: int) -> NDArray[np.int64]:
    """Whether the draft tokens behind each token are accepted: indices of the answer x slots, 1 = accepted."""
    return np.cumprod(correct[:, 1 : 1 + mask_slots], axis=1, dtype=np.int64)


def _ratios(good: Sequence[int], counts: Sequence[int]) -> list[float | None]:
    return [part / count if count else None for part, count in zip(good, counts, strict=True)]


@dataclass
class Tally:
    """Counts over the answers of one kind."""

    mask_slots: int
    segments: int = 0
    tokens: int = 0  # without end tokens, as in a request's statistics
    predictions: list[int] = field(default_factory=list)  # by slot; slot 0 predicts the next token
    correct: list[int] = field(default_factory=list)  # by slot
    steps: list[int] = field(default_factory=list)  # with 0, 1, ... mask slots
    drafted: list[int] = field(
        default_factory=list
    )  # with all mask slots: draft tokens by depth that the answer reaches
    accepted: list[int] = field(default_factory=list)  # of these, by depth

    def __post_init__(self) -> None:
        for counts in (self.predictions, self.correct, self.steps):
            counts.extend([0] * (1 + self.mask_slots))
        for by_depth in (self.drafted, self.accepted):
            by_depth.extend([0] * self.mask_slots)

    def add(self, predicted: NDArray[np.int64], answer: Sequence[int], ended: bool) -> None:
        """Count one segment; `ended` if its last token is an end token."""
        if not answer:
            return
        correct = correct_predictions(predicted, answer)
        self.segments += 1
        self.tokens += len(answer) - ended
        for slot in range(1 + self.mask_slots):
            self.predictions[slot] += max(0, len(answer) - slot)
            self.correct[slot] += int(correct[:, slot].sum())
            self.steps[slot] += count_steps(correct, slot)
        accepted = _accepted(correct, self.mask_slots)
        for last in chain_starts(correct, self.mask_slots):
            for depth in range(min(self.mask_slots, len(answer) - 1 - last)):
                self.drafted[depth] += 1
                self.accepted[depth] += int(accepted[last, depth])

    @property
    def acceptance(self) -> list[float | None]:
        """Share of accepted draft tokens by depth in chains of all mask slots."""
        return _ratios(self.accepted, self.drafted)

    @property
    def accuracy(self) -> list[float | None]:
        """Share of correct predictions by slot; None for a slot without predictions."""
        return _ratios(self.correct, self.predictions)

    def as_dict(self) -> dict[str, Any]:
        """The counts, accuracy and tokens per step as JSON data."""
        return {
            **asdict(self),
            "accuracy": self.accuracy,
            "tokens_per_step": self.tokens_per_step,
            "acceptance": self.acceptance,
        }

    @property
    def tokens_per_step(self) -> list[float | None]:
        """Tokens per step with 0, 1, ... mask slots."""
        return [self.tokens / steps if steps else None for steps in self.steps]


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
    def acceptance(self) -> list[float | None]:
        """Share of accepted tokens by kind; None for a kind without tokens."""
        return _ratios(self.accepted, self.tokens)

    def as_dict(self) -> dict[str, Any]:
        """The counts and shares as JSON data."""
        return {**asdict(self), "acceptance": self.acceptance}


@dataclass
class ForkTally:
    """Predicted against expected [Fork] tokens, over the root threads of reference answers."""

    positions: int = 0
    expected: int = 0  # [Fork] tokens in the reference answers
    predicted: int = 0
    correct: int = 0

    def add(self, predictions: NDArray[np.int64], answer: Sequence[int], fork: int) -> None:
        """Count one root thread, with the next-token prediction at each of its tokens."""
        predicted, expected = predictions == fork, np.array(answer, np.int64) == fork
        self.positions += len(answer)
        self.expected += int(expected.sum())
        self.predicted += int(predicted.sum())
        self.correct += int((predicted & expected).sum())

    def as_dict(self) -> dict[str, Any]:
        """The counts, precision and recall as JSON data."""
        return {**asdict(self), "precision": self.precision, "recall": self.recall}

    @property
    def precision(self) -> float | None:
        return self.correct / self.predicted if self.predicted else None

    @property
    def recall(self) -> float | None:
        return self.correct / self.expected if self.expected else None


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
    """A checkpoint or bundle, checked as far as possible without its weights."""

    path: Path
    draft_tokens: int  # maximum draft tokens from mask slots or heads; 0: neither
    max_seq_len: int | None  # of its runtime; None: known once it is open
    open: Callable[[], AbstractContextManager[Runtime]]

    def require_drafts(self) -> None:
        """Raise for a model without mask slots and heads."""
        if not self.draft_tokens:
            raise InputFault(
                f"{self.path}: has no mask token and no heads, so there are no draft tokens to measure: expected a checkpoint "
                "tuned with mask slots (`spaceport tune`), a base model with --adapter, or a bundle exported from one"
            )


def find_source(folder: Path, options: SourceOptions) -> ModelSource:
    """The bundle or checkpoint in a folder: a bundle runs on a backend, a checkpoint in PyTorch."""
    return _checkpoint(folder, options) if is_checkpoint(folder) else _bundle(folder, options)


@contextmanager
def open_source(folder: Path, options: SourceOptions) -> Iterator[Runtime]:
    """A runtime over the bundle or checkpoint in a folder, which must have mask slots or heads."""
    source = find_source(folder, options)
    source.require_drafts()
    with source.open() as runtime:
        yield runtime


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
    manifest = read_manifest(folder)

    def opened() -> Runtime:
        return Runtime.open(
            folder,
            backend=options.backend,
            max_seq_len=options.max_seq_len,
            threads=options.threads,
        )

    return ModelSource(folder, manifest.drafts.max_tokens, seq_len(manifest, options.max_seq_len), opened)


def _checkpoint(folder: Path, options: SourceOptions) -> ModelSource:
    if options.backend != "auto":
        raise OptionFault(
            f"--backend {options.backend} runs bundles, {folder} is a checkpoint and runs in PyTorch: leave --backend out, "
            "or export the checkpoint first"
        )
    # Imported for checkpoints only: bundles are measured where PyTorch is not installed.
    from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
    from spaceport.exporter.checkpoint_source import quiet_libraries
    from spaceport.tools.reference import checkpoint_runtime

    quiet_libraries()
    checkpoint = open_checkpoint(folder, TokenFlags(), options.remote_code, options.adapter)

    def opened() -> AbstractContextManager[Runtime]:
        return checkpoint_runtime(checkpoint, options.max_seq_len, options.threads)

    return ModelSource(folder, checkpoint.drafts.max_tokens, None, opened)


def require_storage(folder: Path, options: SourceOptions) -> Path:
    """The folder whose sar_config.json stores acceptance rates; raises for a bundle and for a GGUF file."""
    if options.adapter is not None:
        return options.adapter
    if not is_checkpoint(folder):
        raise OptionFault(
            f"--save with the bundle {folder}: expected a checkpoint, since the digests of a bundle "
            "forbid changes; measure its checkpoint or adapter with --save, and export it again"
        )
    if not folder.is_dir():
        raise OptionFault(
            f"--save with the file {folder}: expected a checkpoint folder, or --adapter with an adapter folder that stores "
            "the rates"
        )
    return folder


def is_checkpoint(folder: Path) -> bool:
    """Whether a path is a checkpoint folder or GGUF file, not a bundle."""
    if folder.suffix.lower() == ".gguf":
        return not folder.is_dir()
    return (folder / "config.json").exists() and not (folder / MANIFEST_FILE).exists()


def conversation_encoder_for(runtime: Runtime) -> ConversationEncoder:
    """The tokenization of conversations for a runtime's model, the same as in training."""
    bundle = runtime.bundle

    def rendered(turns: Sequence[Turn], ask: bool) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        return open_template(bundle).render(messages, ask)

    has_template = TEMPLATE_FILE in bundle.manifest.files
    return conversation_encoder_with(runtime.tokenizer, rendered if has_template else None, bundle.manifest.tokens)


@dataclass
class MeasuredDrafts:
    """The acceptance of a model's drafts."""

    generated: Tally  # on the greedy answers that the model generates
    reference: Tally  # on the answers of the data file
    forks: ForkTally | None  # None for a model that does not fork
    predictor: str = "mask slot"  # what predicts beyond the next token: mask slot or head
    lookup: LookupTally = field(default_factory=LookupTally)  # on generated answers

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON data."""
        return {
            "mask_slots": self.reference.mask_slots,
            "predictor": self.predictor,
            "generated": self.generated.as_dict(),
            "reference": self.reference.as_dict(),
            "forks": self.forks and self.forks.as_dict(),
            "lookup_tokens": self.lookup.as_dict(),
        }

    def as_draft_acceptance(self, data: str, day: date) -> DraftAcceptance:
        """The rates along the greedy answers, as a checkpoint stores them.

        Rare kinds of prompt-lookup tokens would have rates by chance: the runtime's initial values count for a few tokens.
        """
        counts = zip(self.lookup.accepted, self.lookup.tokens, USUAL_LOOKUP, strict=True)
        lookup = [(good + _PRIOR * initial) / (count + _PRIOR) for good, count, initial in counts]
        return measured_acceptance(self.generated.acceptance, self.generated.tokens, data, day, lookup)


def measure(runtime: Runtime, samples: Iterable[ReferenceAnswer], max_tokens: int, mask_slots: int) -> MeasuredDrafts:
    """Acceptance on each reference answer, and on the answer that the model generates for the same prompt."""
    manifest, correction = runtime.bundle.manifest, read_correction(runtime.bundle)
    forks = None if manifest.tokens.fork is None else ForkTally()
    measured = MeasuredDrafts(Tally(mask_slots), Tally(mask_slots), forks, PREDICTOR_NAMES[manifest.drafts.predictor])
    for sample in samples:
        for segment in sample.segments:
            _add(runtime, correction, segment, measured.reference, measured.forks)
        answer = generate_answer(runtime, sample.prompt, max_tokens, mask_slots)
        for thread in answer.threads:
            measured.lookup.add(thread.prefix, thread.tokens)
            segment = AnswerSegment(thread.prefix, thread.tokens, thread.fork is not None)
            _add(runtime, correction, segment, measured.generated, None)
    return measured


def _add(
    runtime: Runtime, correction: CorrectionTables | None, segment: AnswerSegment, tally: Tally, forks: ForkTally | None
) -> None:
    if not segment.tokens:
        return
    manifest = runtime.bundle.manifest
    tokens = manifest.tokens
    layout, most = manifest.drafts.layout, runtime.max_seq_len
    predicted = predict_segment(runtime.engine, tokens, segment, tally.mask_slots, layout, most, correction)
    tally.add(predicted, segment.tokens, segment.tokens[-1] in tokens.end)
    if forks is not None and tokens.fork is not None and not segment.child:
        forks.add(predicted[:, 0], segment.tokens, tokens.fork)


@dataclass(frozen=True)
class StepCounts:
    """Tokens and decode steps of generated answers."""

    tokens: int
    steps: int

    @property
    def tokens_per_step(self) -> float | None:
        return self.tokens / self.steps if self.steps else None

    def as_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "steps": self.steps, "tokens_per_step": self.tokens_per_step}


@dataclass(frozen=True)
class ModelAcceptance:
    """The acceptance of a model."""

    model: str
    method: str  # by which it drafts
    adapter: str | None  # name of the published weights that it drafts with
    samples: int
    counts: dict[str, int]  # of conversations
    measured: MeasuredDrafts
    # with prompt lookup: "lookup" alone, "together" with trees of mask slots or heads; empty: not measured
    steps: dict[str, StepCounts] = field(default_factory=dict)

    @property
    def draft_tokens(self) -> int:
        """Maximum draft tokens from mask slots or heads that were measured."""
        return self.measured.generated.mask_slots

    @property
    def drafts(self) -> str:
        """What drafts, such as "3 mask slots"."""
        return drafts_in_words(self.draft_tokens, self.measured.predictor)

    @property
    def exact(self) -> float | None:
        """Share of the generated tokens that plain decoding selects."""
        return self.measured.generated.accuracy[0]

    @property
    def own_tokens_per_step(self) -> float | None:
        """Tokens per step with chains of mask slots or heads; None without them."""
        return self.measured.generated.tokens_per_step[-1] if self.draft_tokens else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "adapter": self.adapter,
            "samples": self.samples,
            "counts": self.counts,
            **self.measured.as_dict(),
            **{name: counts.as_dict() for name, counts in self.steps.items()},
        }


def count_drafted(
    runtime: Runtime, samples: Sequence[ReferenceAnswer], max_tokens: int, mask_slots: int
) -> dict[str, StepCounts]:
    """The steps of generated answers with prompt lookup, thread by thread and with drafts as wide as possible."""
    counted = {}
    for name, slots in (("lookup", 0), ("together", mask_slots)):
        decoding = Decoding(mask_slots=slots, lookup=DEFAULT_LOOKUP)
        answers = [generate_drafted(runtime, sample.prompt, max_tokens, decoding, max_threads=1) for sample in samples]
        tokens = sum(answer.statistics.tokens for answer in answers)
        counted[name] = StepCounts(tokens, sum(answer.statistics.steps for answer in answers))
    return counted
