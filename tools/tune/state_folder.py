"""State folder: saved states and measurements of a running training, from which it can be resumed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from spaceport.exporter.sar_config import read_json
from spaceport.graphs.contract.atomic_file import replace_text
from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.tune.processes import lost_process
from spaceport.tools.tune.settings import TrainingSettings, differences
from spaceport.tools.tune.training import Training, TrainingMeasurement

METRICS_FILE = "metrics.jsonl"
SCHEMA = 2  # of settings.json and progress.json
_SETTINGS_FILE = "settings.json"
_PROGRESS_FILE = "progress.json"
_PARTIAL = ".partial"


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
        progress = json.dumps(read_json(states[-1] / _PROGRESS_FILE), sort_keys=True)
        return f"step {_step(states[-1])} ({hashlib.sha256(progress.encode()).hexdigest()[:12]})"

    def advice(self) -> str:
        """How a training goes on after it has ended too early."""
        states = self._states()
        saved = f"the state after step {_step(states[-1])} is saved" if states else "no state is saved yet"
        return f"{saved}: start all processes again{' with --resume' if self.has_progress() else ''}"

    def check_identity(self, identity: dict[str, list[str]]) -> None:
        """Raise if the training to resume has other inputs."""
        saved = self._saved()["identity"]
        self._refuse(
            [
                f"{name}: {_listed(saved.get(name))} before, {_listed(now)} now"
                for name, now in identity.items()
                if saved.get(name) != now
            ]
        )

    def check_settings(self, settings: TrainingSettings) -> None:
        """Raise if the training to resume has other settings."""
        self._refuse(differences(self._saved()["settings"], settings))

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
                replace_text(partial / _PROGRESS_FILE, json.dumps(progress) + "\n")
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
        if states:
            progress = read_json(states[-1] / _PROGRESS_FILE)
            training.accelerator.load_state(str(states[-1]))
            step, tokens, seconds = int(progress["step"]), int(progress["tokens"]), float(progress["seconds"])
            training.restore(step, tokens, seconds, progress["pending_sums"])
        training.accelerator.wait_for_everyone()
        if self._main:
            for partial in self.folder.glob(f"step-*{_PARTIAL}"):
                shutil.rmtree(partial, ignore_errors=True)
            self._drop_measurements_after(training.step)

    def log(self, measured: TrainingMeasurement, kind: str) -> None:
        """Append a measurement to metrics.jsonl."""
        if self._main:
            with (self.folder / METRICS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **asdict(measured)}) + "\n")

    def measurements(self) -> list[dict[str, Any]]:
        """All measurements so far; a last line that was cut off when the disk was full is skipped."""
        file = self.folder / METRICS_FILE
        text = file.read_text("utf-8") if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]

    def remove(self) -> None:
        """Delete the folder of a finished training."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _saved(self) -> dict[str, Any]:
        """The saved settings and identity."""
        record = read_json(self.folder / _SETTINGS_FILE)
        if record.get("schema") != SCHEMA:
            raise InputFault(
                f"{self.folder}: training state has schema {record.get('schema')}: expected {SCHEMA}; resume with the version of "
                "spaceport that started the training, or remove the folder"
            )
        return record

    def _refuse(self, wrong: list[str]) -> None:
        if wrong:
            raise InputFault(
                f"{self.folder}: started with other settings ({'; '.join(wrong)}): resume with the original settings, or remove "
                "the folder"
            )

    def _states(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if path.suffix != _PARTIAL)

    def _drop_measurements_after(self, step: int) -> None:
        """Remove measurements of steps that will be repeated."""
        earlier = [line for line in self.measurements() if line["step"] <= step]
        replace_text(self.folder / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in earlier))

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


def _step(state: Path) -> int:
    return int(state.name.removeprefix("step-"))


def _listed(values: list[str] | None) -> str:
    return ", ".join(values or ()) or "none"
