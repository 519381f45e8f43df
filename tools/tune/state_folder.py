"""State folder: saved states and measurements of a running training, from which it can be resumed."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError

from spaceport.exporter.sar_config import read_json
from spaceport.graphs.contract.atomic_file import replace_text
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.json_fields import is_whole, short
from spaceport.graphs.contract.manifest import record_of
from spaceport.tools.tune.packed_model import SUMS
from spaceport.tools.tune.processes import failing_together, lost_process
from spaceport.tools.tune.settings import TrainingSettings, differences
from spaceport.tools.tune.training import Training, TrainingMeasurement

METRICS_FILE = "metrics.jsonl"
SCHEMA = 2  # of settings.json and progress.json
_SETTINGS_FILE = "settings.json"
_PROGRESS_FILE = "progress.json"
_PARTIAL = ".partial"
_STATE = re.compile(r"step-\d{8,12}")
_DIGEST = "sha256"  # entry of progress.json: of its other entries
_MOST_TOKENS, _MOST_SECONDS = 2**53, 2**31
_DAMAGE = (
    *(OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, OverflowError, EOFError),
    *(pickle.UnpicklingError, SafetensorError),
)  # what libraries raise for damaged files


class StateFolder:
    """Folder `TARGET.training` beside the target checkpoint, with the state of its training."""

    def __init__(self, target: Path, main: bool) -> None:
        self.folder = target.absolute().with_name(target.absolute().name + ".training")
        self._main = main  # only the main process writes

    def has_progress(self) -> bool:
        """Whether the folder holds a saved state or generated answers."""
        return bool(self._states()) or any(self.folder.glob("answers-*.jsonl"))

    def check_resume(self, resume: bool) -> None:
        """Raise if there is no training to resume, or an unfinished one that a new training would overwrite."""
        if resume and not (self.folder / _SETTINGS_FILE).exists():
            raise InputFault(f"{self.folder}: no training to resume: start it without --resume")
        if not resume and self.has_progress():
            raise InputFault(
                f"{self.folder}: holds an unfinished training for this target: continue it with --resume, or remove the folder"
            )

    def last_state(self) -> str:
        """What a resumed training continues, for a comparison of the processes: the step and a digest of its progress."""
        states = self._states()
        if not states:
            return "none"
        file = states[-1] / _PROGRESS_FILE
        return f"step {_step(states[-1])} ({_digest(file)[:12] if file.is_file() else 'without progress'})"

    def advice(self) -> str:
        """How a training goes on after it has ended too early."""
        states = self._states()
        saved = f"the state after step {_step(states[-1])} is saved" if states else "no state is saved yet"
        return f"{saved}: start all processes again{' with --resume' if self.has_progress() else ''}"

    def check_identity(self, identity: dict[str, list[str]]) -> None:
        """Raise if the training to resume has other inputs."""
        saved = self._saved("identity")
        self._refuse(
            [
                f"{name}: {_listed(saved.get(name))} before, {_listed(now)} now"
                for name, now in identity.items()
                if saved.get(name) != now
            ]
        )

    def check_settings(self, settings: TrainingSettings) -> None:
        """Raise if the training to resume has other settings."""
        self._refuse(differences(self._saved("settings"), settings))

    def create(self, settings: TrainingSettings, identity: dict[str, list[str]]) -> None:
        """Create the folder, unless it holds progress to resume from."""
        if self._main and not self.has_progress():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            record = {"schema": SCHEMA, "settings": settings.as_dict(), "identity": identity}
            replace_text(self.folder / _SETTINGS_FILE, json.dumps(record, indent=2) + "\n")

    def save(self, training: Training) -> None:
        """Save the state of a training; the previous state is removed only after the new one is complete."""
        training.check()
        pending = training.pending_sums()
        target = self.folder / f"step-{training.step:08d}"
        partial = target.with_name(target.name + _PARTIAL)
        with self._write_errors(training, partial):
            if self._main:
                shutil.rmtree(partial, ignore_errors=True)
            training.accelerator.wait_for_everyone()
            training.accelerator.save_state(str(partial))
            training.accelerator.wait_for_everyone()
            if self._main:
                progress: dict[str, Any] = {"step": training.step, "tokens": training.tokens}
                progress |= {"seconds": training.seconds, "pending_sums": pending}
                files = sorted(path for path in partial.rglob("*") if path.is_file())
                progress["files"] = {path.relative_to(partial).as_posix(): _digest(path) for path in files}
                metrics = self.folder / METRICS_FILE
                if metrics.exists():
                    progress["metrics"] = {"size": metrics.stat().st_size, "sha256": _digest(metrics)}
                replace_text(partial / _PROGRESS_FILE, signed(progress))
                shutil.rmtree(target, ignore_errors=True)
                partial.rename(target)
            training.accelerator.wait_for_everyone()
            shutil.rmtree(partial, ignore_errors=True)  # of a process on another file system
        if self._main:
            for old in self._states()[:-1]:
                shutil.rmtree(old, ignore_errors=True)

    def restore(self, training: Training) -> None:
        """Load the last saved state into a training; without one it starts from the beginning."""
        states = self._states()
        metrics = b""
        if states:
            with failing_together(training.accelerator):
                progress = self._progress(states[-1], training)
                metrics = self._measured_before(states[-1], progress)
            with self._damage_named(states[-1]):
                training.accelerator.load_state(str(states[-1]))
            training.restore(progress["step"], progress["tokens"], progress["seconds"], progress["pending_sums"])
        training.accelerator.wait_for_everyone()
        if self._main:
            for partial in self.folder.glob(f"step-*{_PARTIAL}"):
                shutil.rmtree(partial, ignore_errors=True)
            replace_text(self.folder / METRICS_FILE, metrics.decode())

    def log(self, measured: TrainingMeasurement, kind: str) -> None:
        """Append a measurement to metrics.jsonl."""
        if self._main:
            with (self.folder / METRICS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **asdict(measured)}) + "\n")

    def measurements(self) -> list[dict[str, Any]]:
        """All measurements so far."""
        return [json.loads(line) for line in (self.folder / METRICS_FILE).read_text("utf-8").splitlines()]

    def remove(self) -> None:
        """Delete the folder of a finished training."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _saved(self, entry: str) -> dict[str, Any]:
        """An entry of the saved settings and identity."""
        record = read_json(self.folder / _SETTINGS_FILE)
        if record.get("schema") != SCHEMA:
            raise InputFault(
                f"{self.folder}: training state has schema {short(record.get('schema'))}: expected {SCHEMA}; resume with the "
                "version of spaceport that started the training, or remove the folder"
            )
        if not isinstance(record.get(entry), dict):
            raise InputFault(f"{self.folder}: {_SETTINGS_FILE} has no {entry}: it is damaged; remove the folder")
        return cast(dict[str, Any], record[entry])

    def _refuse(self, wrong: list[str]) -> None:
        if wrong:
            raise InputFault(
                f"{self.folder}: started with other settings ({'; '.join(wrong)}): resume with the original settings, or remove "
                "the folder"
            )

    def _states(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if _STATE.fullmatch(path.name) and path.is_dir())

    def _progress(self, state: Path, training: Training) -> dict[str, Any]:
        """The progress of a saved state, after a comparison of its files with their digests; older states have none."""
        with self._damage_named(state):
            progress = read_json(state / _PROGRESS_FILE)
            if _DIGEST in progress and progress.pop(_DIGEST) != _digest_of(progress):
                raise ValueError(f"{_PROGRESS_FILE} has another digest than when it was written")
            _check_progress(progress, _step(state), training)
            for name, digest in progress.get("files", {}).items():
                path = state / name
                if ".." in Path(name).parts or Path(name).is_absolute():
                    raise ValueError(f"{_PROGRESS_FILE} names {short(name)}, which is outside of the state")
                if not path.is_file() or _digest(path) != digest:
                    raise ValueError(f"{name} is not as it was written")
        return progress

    def _measured_before(self, state: Path, progress: dict[str, Any]) -> bytes:
        """The measurements up to a saved state, as lines; those of steps that will be repeated are left out."""
        file = self.folder / METRICS_FILE
        if not self._main or not file.exists():
            return b""
        content = file.read_bytes()
        with self._damage_named(state):
            if (record := progress.get("metrics")) is not None:
                content = content[: record["size"]]
                if hashlib.sha256(content).hexdigest() != record["sha256"]:
                    raise ValueError(f"{file} is not as it was written")
                return content
            # of an older state; a last line may be cut off, from when the disk was full
            lines = [line for line in content.splitlines(keepends=True) if line.endswith(b"}\n")]
            return b"".join(line for line in lines if json.loads(line)["step"] <= progress["step"])

    @contextmanager
    def _damage_named(self, state: Path) -> Iterator[None]:
        """Turn what damaged files cause into an error that names the state."""
        try:
            yield
        except (*_DAMAGE, InputFault) as error:
            if lost_process(error):
                raise
            raise InputFault(
                f"{state}: is damaged ({reason(error)}): remove it to continue from an earlier state, or remove "
                f"{self.folder} to start again"
            ) from error

    @contextmanager
    def _write_errors(self, training: Training, partial: Path) -> Iterator[None]:
        """Turn a failed write into an error that names the state which is still available."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            if lost_process(error):
                raise
            shutil.rmtree(partial, ignore_errors=True)
            states = self._states()
            last = f"the state after step {_step(states[-1])} is available" if states else "no earlier state exists"
            raise InputFault(
                f"{self.folder}: cannot write the state after step {training.step} ({reason(error)}): {last}; free disk space and "
                "continue with --resume"
            ) from error


def reason(error: BaseException) -> str:
    """First line of an exception's message, or its type."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def signed(entries: dict[str, Any]) -> str:
    """The content of progress.json with these entries, and a digest of them."""
    return json.dumps({**entries, _DIGEST: _digest_of(entries)}) + "\n"


def _digest_of(entries: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return record_of(file).sha256


def _check_progress(progress: dict[str, Any], step: int, training: Training) -> None:
    """Raise unless the entries of a progress.json are possible in this training."""
    columns = training.slots + 1
    sums = progress.get("pending_sums")
    checks = {
        "step": progress.get("step") == step and step <= training.batches.steps,
        "tokens": is_whole(progress.get("tokens"), 0) and progress["tokens"] < _MOST_TOKENS,
        "seconds": _is_finite(progress.get("seconds")) and 0 <= progress["seconds"] < _MOST_SECONDS,
        "pending_sums": isinstance(sums, list)
        and len(sums) <= SUMS
        and all(isinstance(row, list) and len(row) == columns and all(map(_is_finite, row)) for row in sums),
        "files": isinstance(progress.get("files", {}), dict),
        "metrics": isinstance(progress.get("metrics", {}), dict),
    }
    for name, possible in checks.items():
        if not possible:
            raise ValueError(f"{name} in {_PROGRESS_FILE} is {short(progress.get(name))}, which is not possible")


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _step(state: Path) -> int:
    return int(state.name.removeprefix("step-"))


def _listed(values: list[str] | None) -> str:
    return ", ".join(values or ()) or "none"
