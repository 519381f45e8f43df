"""Adapters: a tiny base model, and gated adapters trained for one step on it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from spaceport.training import tuning
from spaceport.training.settings import TokenNames, TrainingSettings, TuningJob
from support.gguf_files import random_model
from support.paths import TINY

NAMES = TokenNames(("[D]",), "[Fork]", "[Child]")  # the tiny tokenizer has [M] already


def write_base(folder: Path, tied: bool = True, seed: int = 0) -> Path:
    """A random model with the tiny tokenizer, without special tokens of its own."""
    model = random_model(tied=tied)
    if seed:
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(1.01)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(TINY / name, folder / name)
    return folder


def train(base: Path, target: Path, adapter_only: bool = True) -> Path:
    """A gated adapter trained for one step: alone, or in a whole checkpoint."""
    data = target.with_suffix(".jsonl")
    data.write_text('{"prompt": "import json", "response": "import os"}\n', "utf-8")
    settings = TrainingSettings("sar", "gated-lora", max_steps=1, rank=2, batch_size=1)
    tuning.train(TuningJob(base, target, (data,), settings, NAMES, adapter_only=adapter_only))
    return target
