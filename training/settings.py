"""What a training is asked for: hyperparameters, special tokens, inputs and output; its checks, and its outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from spaceport.exporter.atomic_folder import ADAPTER_FOLDER, CHECKPOINT, FolderKind, check_target
from spaceport.exporter.checkpoint_files import TIKTOKEN_FILE, SarConfig, read_sar_config
from spaceport.graphs.contract.draft_methods import CAUSAL, MAX_MASK_SLOTS, Group, MaskLayout
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import record_of
from spaceport.runtime.sampling.option_fields import check_options, documented, option

Objective = Literal["sar", "apar", "both"]
MAX_CORRECTION_RANK = 512
DEFAULT_MASK_SLOTS = 5
DEFAULT_PHRASES = 65_536
DEFAULT_CUTOFF = 2048  # tokens; lower for a model with fewer positions

Method = Literal["full", "lora", "gated-lora", "embeddings"]
LEAST_ACCURACY = 0.1  # of the first mask slot; one more row costs about a tenth of a step
# Files of a checkpoint that determine, besides its weights, the training samples.
_IDENTITY_FILES = (
    *("config.json", "generation_config.json", "sar_config.json", "chat_template.jinja"),
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", TIKTOKEN_FILE),
)


@documented
@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters of a training; a resumed training must have the same ones."""

    objective: Objective = option("sar", "Train drafting (sar), forking (apar), or both.")
    method: Method = option(
        "full",
        "Parameters to train: all weights (full), LoRA adapters (lora), LoRA adapters on mask rows only, which leave the "
        "base model's output bit-identical (gated-lora), or the embeddings of the new tokens (embeddings).",
    )
    # Draft training
    mask_slots: int | None = option(
        None,
        "Mask slots behind a token: draft tokens per step.",
        1,
        MAX_MASK_SLOTS,
        unset=f"as in the checkpoint or adapter, else {DEFAULT_MASK_SLOTS}",
    )
    distinct: bool = option(False, "Use one mask token per mask slot instead of one shared mask token.")
    shift: bool | None = option(
        None,
        "Whether a mask row predicts the token after its position, or the one at its position.",
        unset="as in the checkpoint, else the one after it",
    )
    group: Group | None = option(
        None,
        "Mask rows of its group that a mask row sees: those before it (causal), or all (block).",
        unset="as in the checkpoint, else causal",
        flag="--mask-group",
    )
    anchors: int = option(32, "Mask groups per sample, at random positions that change every epoch.", 1)
    drop_rate: float = option(
        0.0, "Probability that a mask group ends before each of its mask slots after the first.", 0, 1
    )
    correction_rank: int = option(
        0,
        "Rank of the draft correction, which scores a draft token by the one before it, such as 64; 0 = none.",
        0,
        MAX_CORRECTION_RANK,
    )
    phrases: int = option(
        DEFAULT_PHRASES,
        "Maximum number of phrases that are counted in the data, for draft tokens without mask slots; 0 = none.",
        0,
    )
    mask_weight: float = option(1.0, "Weight of the mask slots' mean loss relative to the next-token loss.", 0)
    # Fork training
    unfork_rate: float = option(0.2, "Probability that an answer that could fork is trained without forks.", 0, 1)
    # Samples
    cutoff: int = option(
        DEFAULT_CUTOFF,
        "Maximum sample length in tokens, prompt included.",
        8,
        unset=f"{DEFAULT_CUTOFF}, or the model's maximum",
    )
    # Optimization
    epochs: float = option(2.0, "Passes over the data.")
    max_steps: int | None = option(None, "Maximum training steps; overrides the epochs if lower.", 1)
    time_budget: float | None = None  # seconds; the training ends earlier if its steps do
    batch_size: int = option(32, "Samples per step, over all processes.", 1)
    micro_batch_size: int = option(
        4, "Samples per forward pass of one process; the rest of a batch accumulates gradients.", 1
    )
    learning_rate: float = option(5e-5, "Peak learning rate, after linear warm-up and before cosine decay.")
    warmup: float = option(0.03, "Warm-up steps as a fraction of all steps.", 0, 1)
    weight_decay: float = option(0.0, "AdamW weight decay of matrices, embeddings excluded.", 0)
    clip: float = option(1.0, "Maximum gradient norm.")
    betas: tuple[float, float] = (0.9, 0.95)
    seed: int = option(0, "Seed of the sample order, the anchors and new weights.", 0)
    # LoRA
    rank: int = option(16, "LoRA rank.", 1)
    alpha: float = option(32.0, "LoRA alpha: adapters are scaled by alpha / rank.")
    targets: tuple[str, ...] = option(
        (), "Linear layer to adapt, such as q_proj.", unset="all", flag="--target", metavar="NAME"
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("epochs", "learning_rate", "clip", "alpha", "time_budget"):
            positive = getattr(self, name)
            if positive is not None and not 0 < positive < float("inf"):
                raise OptionFault(f"{name} is {positive}: expected more than 0")
        if self.targets and self.method not in ("lora", "gated-lora"):
            raise OptionFault(
                f"--target {self.targets[0]} with --method {self.method}, which adds no adapters: expected --method lora or "
                "gated-lora"
            )

    @property
    def drafts(self) -> bool:
        return self.objective in ("sar", "both")

    @property
    def forks(self) -> bool:
        return self.objective in ("apar", "both")

    @property
    def slots(self) -> int:
        """Number of mask slots that are trained."""
        return (self.mask_slots or DEFAULT_MASK_SLOTS) if self.drafts else 0

    @property
    def mask_layout(self) -> MaskLayout:
        """What mask rows predict and see."""
        return MaskLayout(
            CAUSAL.shift if self.shift is None else self.shift, CAUSAL.group if self.group is None else self.group
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class TokenNames:
    """Text of each special token that a tuned model uses."""

    masks: tuple[str, ...]
    fork: str | None
    child: str | None

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.masks, *(name for name in (self.fork, self.child) if name is not None))


DEFAULT = TokenNames(("[M]",), "[Fork]", "[Child]")


def resolve_token_names(
    mask_rows: int, distinct: bool, forks: bool, requested: TokenNames, sar_config: SarConfig
) -> TokenNames:
    """Token names for one tuning: the requested ones, except where the checkpoint's sar_config.json already has names."""
    for name in requested.all:
        if not name.strip() or len(set(requested.all)) < len(requested.all):
            raise OptionFault(
                f"special tokens {', '.join(map(repr, requested.all))}: expected non-empty names, all different"
            )
    masks = requested.masks if mask_rows else ()
    if masks and distinct:
        opening, closing = (masks[0][:-1], masks[0][-1]) if masks[0][-1:] in ")]>|" else (masks[0], "")
        masks = tuple(f"{opening}{slot + 1}{closing}" for slot in range(mask_rows))
    new = masks
    existing = sar_config.mask_tokens or ()
    if existing and (not mask_rows or len(existing) == len(masks)):
        masks = existing
    fork, child = (sar_config.fork_token, sar_config.child_token) if sar_config.fork_token else (None, None)
    if forks and fork is None:
        fork, child = requested.fork, requested.child
    names = TokenNames(masks, fork, child)
    unused = {*requested.all} - {*DEFAULT.all, *names.all, *(requested.masks if masks == new else ())}
    if unused:
        raise OptionFault(
            f"special token {min(unused)} would not be used: the tuned model's tokens are {', '.join(names.all)}; expected "
            "a name for a token that the objective needs and that the checkpoint's sar_config.json does not name already"
        )
    return names


@dataclass(frozen=True)
class TuningJob:
    """Inputs, output and options of one tuning."""

    checkpoint: Path
    target: Path  # folder of the tuned checkpoint, or of its adapter
    data: tuple[Path, ...]
    settings: TrainingSettings
    names: TokenNames = DEFAULT
    validation: tuple[Path, ...] = ()
    bf16: bool = option(False, "Compute in bfloat16; trained weights stay float32.")
    recompute: bool = option(
        False,
        "Recompute activations in the backward pass: less memory, a third more compute.",
        flag="--gradient-checkpointing",
    )
    save_every: int = option(500, "Steps between saved states.", 1)
    log_every: int = option(10, "Steps between measurements in metrics.jsonl; at most one in 10 seconds is printed.", 1)
    resume: bool = option(False, "Continue from the saved state, if there is one; give the same options again.")
    overwrite: bool = False
    adapter: Path | None = None  # adapter folder to train further
    adapter_only: bool = option(
        False,
        "Write the adapter of method gated-lora without the base weights, for `spaceport export --adapter`.",
    )
    remote_code: bool = False

    @property
    def target_kind(self) -> FolderKind:
        """What the target folder is."""
        return ADAPTER_FOLDER if self.adapter_only else CHECKPOINT


@dataclass(frozen=True)
class TuningOutcome:
    """Sample counts, settings and measurements of a finished tuning."""

    counts: Counter[str]
    settings: TrainingSettings
    measurements: list[dict[str, Any]]

    def last(self, kind: str) -> dict[str, Any] | None:
        """The last measurement of a kind: training or validation."""
        return next((line for line in reversed(self.measurements) if line["kind"] == kind), None)

    @property
    def warning(self) -> str | None:
        """That drafts will not pay, and what to change; None if they may."""
        kind = "validation" if self.last("validation") else "training"
        measured = self.last(kind) or {}
        first = [*measured.get("accuracies", ())[1:2], *measured.get("corrected", ())[:1]]  # of the first mask slot
        accuracy = max((one for one in first if one is not None), default=None)
        if accuracy is None or accuracy >= LEAST_ACCURACY:
            return None
        return (
            f"drafts will not pay: the first mask slot predicts {accuracy:.0%} of the {kind} data, and a draft that is accepted "
            f"less often than {LEAST_ACCURACY:.0%} costs more than it saves: train longer (--epochs, --time-budget), with a "
            "higher --learning-rate, or on the model's own answers (`spaceport distill`)"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "samples": dict(self.counts),
            "settings": self.settings.as_dict(),
            "training": self.last("training"),
            "validation": self.last("validation"),
        }


def check_job(job: TuningJob) -> None:
    """Raise for invalid options before anything is loaded."""
    check_target(job.target, job.overwrite, job.target_kind)
    check_options(job)
    method = job.settings.method
    for flag, given in (("--adapter", job.adapter is not None), ("--adapter-only", job.adapter_only)):
        if given and method != "gated-lora":
            raise OptionFault(f"{flag} has no effect with --method {method}: use --method gated-lora, or leave it out")
    if method == "gated-lora" and job.settings.objective == "apar" and job.adapter is None:
        raise OptionFault(
            "--method gated-lora with --objective apar: its adapters act on mask rows, and there are none; expected "
            "--objective sar or both, an adapter that learns to fork (--adapter), or --method embeddings"
        )
    if job.target.resolve() == job.checkpoint.resolve():
        raise OptionFault(f"{job.target}: is the checkpoint to tune and would be overwritten: choose another folder")
    for path in (job.checkpoint, *job.data, *job.validation):
        if job.target.resolve() in path.resolve().parents:
            raise OptionFault(
                f"{job.target}: contains the input {path}, which would be overwritten: choose another folder"
            )
    if not job.data:
        raise OptionFault("no data: expected at least one JSONL file")


def facts_of(job: TuningJob) -> dict[str, Any]:
    """Inputs and settings of a training, which a resumed one must have too."""
    own = [job.checkpoint] if job.checkpoint.is_file() else map(job.checkpoint.joinpath, _IDENTITY_FILES)
    return {
        "data": _digests(job.data),
        "validation": _digests(job.validation),
        "checkpoint": _digests(path for path in own if path.exists()),
        "adapter": "none" if job.adapter is None else _digests(read_sar_config(job.adapter).tensor_files(job.adapter)),
        "tokens": job.names.all,
        "bf16": job.bf16,
        **job.settings.as_dict(),
    }


def _digests(files: Iterable[Path]) -> str:
    """Names and SHA-256 digests of files."""
    found = []
    for path in files:
        with path.open("rb") as file:
            found.append(f"{path.name} {record_of(file).sha256}")
    return ", ".join(found) or "none"
