"""Gated training: a short training of a gated adapter on lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from spaceport.exporter.adapter import ADAPTER_FILE
from spaceport.tools.tune.job import TuningJob
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.tuning import tune
from support.paths import TINY

SETTINGS = TrainingSettings(
    method="gated-lora", batch_size=2, max_steps=6, epochs=9, anchors=4, mask_slots=3, rank=2, cutoff=160, warmup=0.0
)
LIST = "Three:\n\n1. Red: the colour of fire\n2. Green: the colour of grass\n3. Blue: the colour of the sea"


def write_lists(file: Path) -> Path:
    """Write four requests for a list with their answers; returns the file."""
    lines = [{"prompt": f"Which {number}?", "response": LIST} for number in range(4)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return file


def trained(data: Path, target: Path, settings: TrainingSettings = SETTINGS, **more: Any) -> dict[str, Tensor]:
    """The tensors of the adapter that a training writes into `target`."""
    tune(TuningJob(TINY, target, (data,), settings, adapter_only=True, **more))
    return load_file(target / ADAPTER_FILE)
