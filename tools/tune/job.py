"""Job: the request for a tuning, its checks, what identifies it, the callbacks, and its outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spaceport import __version__
from spaceport.exporter.atomic_folder import ADAPTER_FOLDER, CHECKPOINT, FolderKind, check_target
from spaceport.exporter.checkpoint_files import own_files
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import record_of
from spaceport.tools.tune.settings import DEFAULT, TokenNames, TrainingSettings
from spaceport.tools.tune.training import Training, TrainingMeasurement
from spaceport.tools.tune.tunable_model import IDENTITY_FILES


@dataclass(frozen=True)
class TuningJob:
    """Inputs, output and options of one tuning."""

    checkpoint: Path
    target: Path  # folder of the tuned checkpoint, or of its adapter
    data: tuple[Path, ...]
    settings: TrainingSettings
    names: TokenNames = DEFAULT
    validation: tuple[Path, ...] = ()
    bf16: bool = False
    recompute: bool = False  # gradient checkpointing: less memory, a third more compute
    save_every: int = 500  # steps
    log_every: int = 10  # steps
    resume: bool = False
    auto_resume: bool = False  # resume if a state is saved, start otherwise
    process_timeout: float = 1800.0  # seconds that a process waits for the others, such as while the first one saves
    overwrite: bool = False
    adapter: Path | None = None  # adapter folder to train further
    adapter_only: bool = False  # write the adapter of method gated-lora without the base weights
    remote_code: bool = False
    self_distill: bool = False  # replace the answers in the data by the model's own
    bundle: Path | None = None  # of the checkpoint, which generates these answers faster


@dataclass(frozen=True)
class TrainingCallbacks:
    """Functions called while a tuning runs."""

    on_stage: Callable[[str], None] = lambda name: None
    on_samples: Callable[[Counter[str]], None] = lambda counts: None
    on_start: Callable[[Training], None] = lambda training: None
    on_measurement: Callable[[TrainingMeasurement, str], None] = lambda measured, kind: None
    on_step: Callable[[Training], None] = lambda training: None
    should_stop: Callable[[], bool] = lambda: False  # True: save the state and end after this step


@dataclass(frozen=True)
class TuningOutcome:
    """Sample counts, settings and measurements of a finished tuning."""

    counts: Counter[str]
    settings: TrainingSettings
    measurements: list[dict[str, Any]]

    def last(self, kind: str) -> dict[str, Any] | None:
        """The last measurement of a kind: training or validation."""
        return next((line for line in reversed(self.measurements) if line["kind"] == kind), None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "samples": dict(self.counts),
            "settings": self.settings.as_dict(),
            "training": self.last("training"),
            "validation": self.last("validation"),
        }


def target_kind(job: TuningJob) -> FolderKind:
    """What the target folder is."""
    return ADAPTER_FOLDER if job.adapter_only else CHECKPOINT


def check_job(job: TuningJob) -> None:
    """Raise for invalid options before anything is loaded."""
    check_target(job.target, job.overwrite, target_kind(job))
    if job.adapter is not None and job.settings.method != "gated-lora":
        raise OptionFault(f"--adapter with --method {job.settings.method}: expected --method gated-lora")
    if job.settings.method == "gated-lora" and job.settings.objective == "apar" and job.adapter is None:
        raise OptionFault(
            "--method gated-lora with --objective apar: its adapters act on mask rows, and there are none; expected "
            "--objective sar or both, an adapter that learns to fork (--adapter), or --method embeddings"
        )
    if job.adapter_only and job.settings.method != "gated-lora":
        raise OptionFault(f"--adapter-only with --method {job.settings.method}: expected --method gated-lora")
    if job.target.resolve() == job.checkpoint.resolve():
        raise OptionFault(f"{job.target}: is the checkpoint to tune and would be overwritten: choose another folder")
    for path in (job.checkpoint, *job.data, *job.validation):
        if job.target.resolve() in path.resolve().parents:
            raise OptionFault(
                f"{job.target}: contains the input {path}, which would be overwritten: choose another folder"
            )
    for name, value in (("save-every", job.save_every), ("log-every", job.log_every)):
        if value < 1:
            raise OptionFault(f"--{name} is {value}: expected at least 1")
    if job.process_timeout <= 0:
        raise OptionFault(f"--process-timeout is {job.process_timeout:g}: expected more than 0")
    if job.auto_resume and (job.resume or job.overwrite):
        other = "--resume" if job.resume else "--overwrite"
        raise OptionFault(
            f"--auto-resume with {other}: a training that is restarted would {'fail without a state' if job.resume else 'replace its own result'}; "
            f"leave {other} out"
        )
    if not job.data:
        raise OptionFault("no data: expected at least one JSONL file")


def identity_of(job: TuningJob) -> dict[str, list[str]]:
    """Inputs that, besides the settings, identify a training."""
    own = [job.checkpoint] if job.checkpoint.is_file() else map(job.checkpoint.joinpath, IDENTITY_FILES)
    return {
        "data": [f"{path.name} {_digest(path)}" for path in job.data],
        "validation": [f"{path.name} {_digest(path)}" for path in job.validation],
        "checkpoint": [f"{path.name} {_digest(path)}" for path in own if path.exists()],
        **({} if job.adapter is None else {"adapter": _digests(job.adapter)}),
        "tokens": list(job.names.all),
        "self-distill": [str(job.self_distill)],
        "bf16": [str(job.bf16)],
    }


def facts_of(job: TuningJob, identity: dict[str, list[str]]) -> dict[str, str]:
    """What must be the same in all processes of a training."""
    return {
        "version of Spaceport": __version__,
        **{name: ", ".join(values) or "none" for name, values in identity.items()},
        **{name: str(value) for name, value in job.settings.as_dict().items()},
        "gradient-checkpointing": str(job.recompute),
        "adapter-only": str(job.adapter_only),
        "save-every": str(job.save_every),
        "log-every": str(job.log_every),
        "resume": str(job.resume),
    }


def _digests(adapter: Path) -> list[str]:
    """Digests of what is trained further."""
    return [_digest(file) for file in own_files(adapter)]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return record_of(file).sha256
