"""Job: the request for a tuning, the callbacks that report its progress, and its outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spaceport.tools.tune.distill import AnswerSource
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.token_names import DEFAULT, TokenNames
from spaceport.tools.tune.training import Training, TrainingMeasurement


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
    distillation: AnswerSource | None = None


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
