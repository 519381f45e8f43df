"""Inputs: the checks of a tuning's options and files, and what identifies a training that is resumed."""

from __future__ import annotations

from pathlib import Path

from spaceport import __version__
from spaceport.exporter.atomic_folder import ADAPTER_FOLDER, CHECKPOINT, FolderKind, check_target
from spaceport.exporter.checkpoint_files import own_files
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import record_of
from spaceport.tools.tune.job import TuningJob
from spaceport.tools.tune.tunable_model import IDENTITY_FILES


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
        "self-distill": [str(job.distillation is not None)],
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
