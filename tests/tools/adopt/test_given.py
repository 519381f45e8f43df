"""Given: the files in a path show whether it is a base model, an adapter or the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.adopt.given import PEFT_FILE, Paths, Request, arrange, read_given


def written(folder: Path, name: str, **entries: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(entries), "utf-8")
    return folder


def test_the_files_in_a_path_show_what_it_is(tmp_path: Path) -> None:
    base, adapter = written(tmp_path / "base", "config.json"), written(tmp_path / "adapter", PEFT_FILE)
    target = tmp_path / "target"
    assert arrange([base]) == Paths(base, None, None)
    assert arrange([base, target]) == Paths(base, None, target)
    assert arrange([base, adapter]) == Paths(base, adapter, None)
    assert arrange([base, adapter, target]) == Paths(base, adapter, target)
    inside = written(base / "adapter", PEFT_FILE)
    assert arrange([base, target]) == Paths(base, inside, target)
    assert arrange([base, adapter, target]) == Paths(base, adapter, target)
    nemotron = written(tmp_path / "nemotron", "config.json")
    inside = written(nemotron / "linear_spec_lora", PEFT_FILE)
    assert arrange([nemotron, target]) == Paths(nemotron, inside, target)
    with pytest.raises(OptionFault, match=r"4 paths: expected CHECKPOINT \[ADAPTER\] TARGET"):
        arrange([base, adapter, target, target])


def test_an_adapter_before_its_base_model_is_refused(tmp_path: Path) -> None:
    adapter = written(tmp_path / "adapter", PEFT_FILE, base_model_name_or_path="Qwen/Qwen3-8B")
    with pytest.raises(
        CheckpointError, match=r"without its base model: expected .* the folder of Qwen/Qwen3-8B as CHECK"
    ):
        arrange([adapter, tmp_path / "target"])


def test_the_mask_token_of_the_training_counts_before_the_checkpoints(tmp_path: Path) -> None:
    base = written(tmp_path / "base", "config.json", mask_token_id=3)
    adapter = written(tmp_path / "published" / "adapter", PEFT_FILE)
    named = read_given(Paths(base, adapter, None), Request()).named_mask
    assert named is not None
    assert named.token == 3
    written(tmp_path / "published", "config.json", mask_token_id=4)
    named = read_given(Paths(base, adapter, None), Request()).named_mask
    assert named is not None
    assert named.token == 4
    written(adapter, "config.json", mask_token_id=5)
    named = read_given(Paths(base, adapter, None), Request()).named_mask
    assert named is not None
    assert named.token == 5
