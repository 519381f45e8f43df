"""States: the saved states and measurements of a running training, from which it is resumed."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError

from spaceport.exporter.checkpoint_files import read_json
from spaceport.graphs.contract.atomic_file import replace_text
from spaceport.graphs.contract.faults import InputFault
from spaceport.training.training import Training, TrainingMeasurement

METRICS_FILE = "metrics.jsonl"
_FACTS_FILE = "training.json"
_PROGRESS_FILE = "progress.json"
_KEPT = 2  # newest states
_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
_DAMAGE = (*_WRITE_ERRORS, ValueError, TypeError, KeyError, EOFError, pickle.UnpicklingError, InputFault)


class TrainingStates:
    """Folder `TARGET.training` beside the target checkpoint: accelerate's states of the training, and its measurements."""

    def __init__(self, target: Path, accelerator: Accelerator, resume: bool) -> None:
        self.folder = target.absolute().with_name(target.absolute().name + ".training")
        self._accelerator = accelerator
        if self._states() and not resume:
            raise InputFault(
                f"{self.folder}: holds an unfinished training for this target: continue it with --resume, or remove the folder"
            )

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Create the folder of a new training; raise if a saved one, or another process, has other inputs or settings."""
        states = self._states()
        if len({*gather_object([json.dumps([[state.name for state in states], dict(facts)])])}) > 1:
            raise InputFault(
                f"the processes of this training have other data, settings or states in {self.folder}: start all with the same "
                "options and files, on a common file system or with copies of this folder"
            )
        if not states:
            if self._accelerator.is_main_process:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir()
                replace_text(self.folder / _FACTS_FILE, json.dumps(dict(facts), indent=2) + "\n")
            return
        with self._damage_named(self.folder / _FACTS_FILE):
            saved = read_json(self.folder / _FACTS_FILE)
        known = json.loads(json.dumps(dict(facts)))
        wrong = [
            f"{name}: {saved.get(name)} before, {now} now" for name, now in known.items() if saved.get(name) != now
        ]
        if wrong:
            raise InputFault(
                f"{self.folder}: started with other settings ({'; '.join(wrong)}): resume with the original settings, or remove "
                "the folder"
            )

    def save(self, training: Training) -> None:
        """Save the state of a training; a state has its final name once it is complete."""
        training.check()
        state = self.folder / f"step-{training.step:08d}"
        partial = state.with_name(state.name + ".partial")
        main, progress = self._accelerator.is_main_process, training.progress()
        with write_errors(f"the state after step {training.step} in {self.folder}"):
            self._accelerator.save_state(str(partial))
            if main:
                (partial / _PROGRESS_FILE).write_text(json.dumps(progress) + "\n", "utf-8")
        self._accelerator.wait_for_everyone()
        if main:
            partial.rename(state)
            for old in self._states()[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        self._accelerator.wait_for_everyone()

    def restore(self, training: Training) -> None:
        """Load the last saved state into a training; without one it starts from the beginning."""
        lines: list[str] = []
        if states := self._states():
            with self._damage_named(states[-1]):
                # dropout continues from it; accelerate goes on without it
                (states[-1] / f"random_states_{self._accelerator.process_index}.pkl").stat()
                self._accelerator.load_state(str(states[-1]))
                training.restore(**read_json(states[-1] / _PROGRESS_FILE))
            # lines of steps that are repeated are left out, and a last one that was cut off
            whole = [line for line in self._metrics().splitlines(keepends=True) if line.endswith("}\n")]
            lines = [line for line in whole if json.loads(line)["step"] <= training.step]
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            for partial in self.folder.glob("step-*.partial"):
                shutil.rmtree(partial, ignore_errors=True)
            replace_text(self.folder / METRICS_FILE, "".join(lines))

    def log(self, measured: TrainingMeasurement, kind: str) -> None:
        """Append a measurement to metrics.jsonl."""
        if self._accelerator.is_main_process:
            with (self.folder / METRICS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **asdict(measured)}) + "\n")

    def measurements(self) -> list[dict[str, Any]]:
        """All measurements so far."""
        return [json.loads(line) for line in self._metrics().splitlines()]

    def remove(self) -> None:
        """Delete the folder of a finished training."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _metrics(self) -> str:
        file = self.folder / METRICS_FILE
        return file.read_text("utf-8") if file.exists() else ""

    def _states(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))

    @contextmanager
    def _damage_named(self, path: Path) -> Iterator[None]:
        """Turn what damaged files cause into an error that names them."""
        try:
            yield
        except _DAMAGE as error:
            raise InputFault(
                f"{path}: is damaged ({_reason(error)}): remove it to continue from an earlier state, or remove {self.folder} "
                "to start again"
            ) from error


@contextmanager
def write_errors(what: str) -> Iterator[None]:
    """Turn a failed write into an error that says how to continue."""
    try:
        yield
    except _WRITE_ERRORS as error:
        raise InputFault(
            f"cannot write {what} ({_reason(error)}): free disk space, and continue from the last state with --resume"
        ) from error


def _reason(error: BaseException) -> str:
    """First line of an exception's message, or its type."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
