"""Job: what a tuning is asked for, what it reports while it runs, and its outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spaceport.tools.tune.distill import Distillation
from spaceport.tools.tune.names import DEFAULT, Names
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.training import Training, TrainingMeasurement


@dataclass(frozen=True)
class TuningJob:
    """What is to be tuned, on what, and how it goes about it; only `settings` decides what comes out."""

    checkpoint: Path
    target: Path
    data: tuple[Path, ...]
    settings: TrainingSettings
    names: Names = DEFAULT
    validation: tuple[Path, ...] = ()
    bf16: bool = False
    recompute: bool = False  # gradient checkpointing: less memory, a third more work
    save_every: int = 500  # steps
    log_every: int = 10  # steps
    resume: bool = False
    overwrite: bool = False
    remote_code: bool = False
    distillation: Distillation | None = None


@dataclass(frozen=True)
class TrainingCallbacks:
    """Functions that are called as a tuning proceeds."""

    stage: Callable[[str], None] = lambda name: None
    prepared: Callable[[Counter[str]], None] = lambda counts: None
    begun: Callable[[Training], None] = lambda training: None
    measured: Callable[[TrainingMeasurement, str], None] = lambda measured, kind: None
    stepped: Callable[[Training], None] = lambda training: None
    stop: Callable[[], bool] = lambda: False  # whether to keep the state and end here


@dataclass(frozen=True)
class TuningOutcome:
    """What a tuning came to."""

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
