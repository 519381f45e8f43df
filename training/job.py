"""Job: the request for a tuning, its checks, what identifies it, and its outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spaceport.exporter.atomic_folder import ADAPTER_FOLDER, CHECKPOINT, FolderKind, check_target
from spaceport.exporter.checkpoint_files import TIKTOKEN_FILE, read_sar_config
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import record_of
from spaceport.runtime.sampling.option_fields import check_options, option
from spaceport.training.settings import DEFAULT, TokenNames, TrainingSettings

LEAST_ACCURACY = 0.1  # of the first mask slot; one more row costs about a tenth of a step
# Files of a checkpoint that determine, besides its weights, the training samples.
_IDENTITY_FILES = (
    *("config.json", "generation_config.json", "sar_config.json", "chat_template.jinja"),
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", TIKTOKEN_FILE),
)


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
