"""Adapters: gated ones, trained for one step."""

from __future__ import annotations

from pathlib import Path

from spaceport.training import tuning
from spaceport.training.settings import TokenNames, TrainingSettings, TuningJob

NAMES = TokenNames(("[D]",), "[Fork]", "[Child]")  # the tiny tokenizer has [M] already


def train(base: Path, target: Path, adapter_only: bool = True) -> Path:
    """A gated adapter trained for one step: alone, or in a whole checkpoint."""
    data = target.with_suffix(".jsonl")
    data.write_text('{"prompt": "import json", "response": "import os"}\n', "utf-8")
    settings = TrainingSettings("sar", "gated-lora", max_steps=1, rank=2, batch_size=1)
    tuning.train(TuningJob(base, target, (data,), settings, NAMES, adapter_only=adapter_only))
    return target
