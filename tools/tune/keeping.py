"""Keeping: the folder of a training under way: its state after some steps, from which it can go on, and its measurements."""

from __future__ import annotations

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
from spaceport.tools.tune.settings import TrainingSettings, differences
from spaceport.tools.tune.training import Training, TrainingMeasurement

METRICS_FILE = "metrics.jsonl"
_SETTINGS_FILE = "settings.json"
_PLACE_FILE = "place.json"
_PARTIAL = ".partial"


class Keeping:
    """What a training leaves on the disk while it runs, beside the folder that it will write."""

    def __init__(self, target: Path, main: bool) -> None:
        self.folder = target.absolute().with_name(target.absolute().name + ".training")
        self._main = main  # only one process of several writes

    def expect(self, resume: bool) -> None:
        """Raise if there is no training to go on with, or one in the way that would be lost."""
        if resume and not (self.folder / _SETTINGS_FILE).exists():
            raise InputFault(f"{self.folder}: no training to go on with: start it without --resume")
        if not resume and self._holds_work():
            raise InputFault(
                f"{self.folder}: a training for this folder was begun and not finished: go on with --resume, or remove it"
            )

    def hold_to(self, identity: dict[str, list[str]]) -> None:
        """Raise if the training to go on with learns something else."""
        told = read_json(self.folder / _SETTINGS_FILE)["identity"]
        self._refuse(
            [
                f"{name}: {_listed(told.get(name))} before, {_listed(now)} now"
                for name, now in identity.items()
                if told.get(name) != now
            ]
        )

    def hold_to_settings(self, settings: TrainingSettings) -> None:
        """Raise if the training to go on with has other settings."""
        self._refuse(differences(read_json(self.folder / _SETTINGS_FILE)["settings"], settings))

    def _refuse(self, wrong: list[str]) -> None:
        if wrong:
            raise InputFault(
                f"{self.folder}: begun with other settings ({'; '.join(wrong)}): resume with the ones that it was begun with, "
                "or remove the folder"
            )

    def begin(self, settings: TrainingSettings, identity: dict[str, list[str]]) -> None:
        """Make the folder, if it holds nothing to go on with."""
        if self._main and not self._holds_work():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            told = {"settings": settings.as_dict(), "identity": identity}
            replace_text(self.folder / _SETTINGS_FILE, json.dumps(told, indent=2) + "\n")

    def save(self, training: Training) -> None:
        """Keep the state of a training; the one before stays until this one is whole."""
        training.check()
        unmeasured = training.unmeasured()
        target = self.folder / f"step-{training.step:08d}"
        partial = target.with_name(target.name + _PARTIAL)
        with self._told(training, partial):
            if self._main:
                shutil.rmtree(partial, ignore_errors=True)
            training.accelerator.wait_for_everyone()
            training.accelerator.save_state(str(partial))
            training.accelerator.wait_for_everyone()
            if self._main:
                place: dict[str, Any] = {"step": training.step, "tokens": training.tokens, "seconds": training.seconds}
                place["unmeasured"] = unmeasured
                replace_text(partial / _PLACE_FILE, json.dumps(place) + "\n")
                shutil.rmtree(target, ignore_errors=True)
                partial.rename(target)
        if self._main:
            for old in self._states()[:-1]:
                shutil.rmtree(old, ignore_errors=True)

    def restore(self, training: Training) -> None:
        """Take a training to where its last state was kept; without any it begins at the beginning."""
        states = self._states()
        if states:
            place = read_json(states[-1] / _PLACE_FILE)
            training.accelerator.load_state(str(states[-1]))
            training.go_on(int(place["step"]), int(place["tokens"]), float(place["seconds"]), place["unmeasured"])
        training.accelerator.wait_for_everyone()
        if self._main:
            for partial in self.folder.glob(f"step-*{_PARTIAL}"):
                shutil.rmtree(partial, ignore_errors=True)
            self._forget_after(training.step)

    def note(self, measured: TrainingMeasurement, kind: str) -> None:
        """Add a measurement to the file of all of them."""
        if self._main:
            with (self.folder / METRICS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **asdict(measured)}) + "\n")

    def measurements(self) -> list[dict[str, Any]]:
        """All measurements so far; a line that was cut off when the disk was full is none."""
        file = self.folder / METRICS_FILE
        text = file.read_text("utf-8") if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]

    def clear(self) -> None:
        """Remove the folder: the training is finished."""
        if self._main:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _states(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if path.suffix != _PARTIAL)

    def _holds_work(self) -> bool:
        """Whether a state or answers are there; without them nothing is lost by beginning anew."""
        return bool(self._states()) or any(self.folder.glob("answers-*.jsonl"))

    def _forget_after(self, step: int) -> None:
        """Drop the measurements of steps that will be learned again."""
        kept = [line for line in self.measurements() if line["step"] <= step]
        replace_text(self.folder / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in kept))

    @contextmanager
    def _told(self, training: Training, partial: Path) -> Iterator[None]:
        """Say what is left if a state cannot be written."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            states = self._states()
            kept = f"the state after step {int(states[-1].name[5:])} is kept" if states else "no earlier state was kept"
            raise InputFault(
                f"{self.folder}: the state after step {training.step} cannot be written ({reason(error)}): {kept}; make room "
                "on the disk and go on with --resume"
            ) from error


def _listed(told: list[str] | None) -> str:
    return ", ".join(told or ()) or "none"


def reason(error: BaseException) -> str:
    """What a library raised, in one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
