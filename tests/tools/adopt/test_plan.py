"""Given: the files in the paths show what each of them is, which method it is, and why it cannot be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.checkpoint_files import ModelFiles, read_json
from spaceport.graphs.contract.faults import CheckpointError, OptionFault
from spaceport.tools.adopt.adopt import find_method
from spaceport.tools.adopt.plan import PEFT_FILE, AdoptionRequest, Given, arrange, read_given

BASE, ADAPTER = Path("base"), Path("adapter")


def written(folder: Path, name: str, **entries: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(entries), "utf-8")
    return folder


def test_the_files_in_a_path_show_what_it_is(tmp_path: Path) -> None:
    base, adapter = written(tmp_path / "base", "config.json"), written(tmp_path / "adapter", PEFT_FILE)
    target = tmp_path / "target"
    assert arrange([base]) == (base, None, None)
    assert arrange([base, target]) == (base, None, target)
    assert arrange([base, adapter]) == (base, adapter, None)
    inside = written(base / "adapter", PEFT_FILE)
    assert arrange([base, target]) == (base, inside, target)
    assert arrange([base, adapter, target]) == (base, adapter, target)
    with pytest.raises(OptionFault, match=r"4 paths: expected CHECKPOINT \[ADAPTER\] TARGET"):
        arrange([base, adapter, target, target])
    written(adapter, PEFT_FILE, base_model_name_or_path="Qwen/Qwen3-8B")
    with pytest.raises(CheckpointError, match=r"without its base model: .* the folder of Qwen/Qwen3-8B as CHECK"):
        arrange([adapter, target])


def test_the_mask_token_of_the_training_counts_before_the_checkpoints(tmp_path: Path) -> None:
    base = written(tmp_path / "base", "config.json", mask_token_id=3)
    adapter = written(tmp_path / "published" / "adapter", PEFT_FILE)
    found = []
    for token, folder in ((3, base), (4, adapter.parent), (5, adapter)):
        written(folder, "config.json", mask_token_id=token)
        named = read_given(ModelFiles(base, read_json(base / "config.json")), adapter, AdoptionRequest()).named_mask
        found.append(named and named.token)
    assert found == [3, 4, 5]


SHOWN: list[tuple[Path | None, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    (None, {"pard_token": 7}, {}, {}, "pard: pard_token 7 in config.json"),
    (ADAPTER, {}, {"noise": "uniform", "mask_token_id": 7}, {}, "uno: noise uniform in config.json"),
    (ADAPTER, {}, {"mask_token_id": 7}, {}, "gated-lora: mask_token_id 7 in config.json"),
    (ADAPTER, {"mask_token_id": 7}, {}, {}, "gated-lora: mask_token_id 7 in config.json"),
    (ADAPTER, {}, {}, {"mask_tokens": ("9",)}, "gated-lora: --mask-token 9"),
    (ADAPTER, {}, {}, {"method": "uno"}, "uno: --method uno"),
    (ADAPTER, {}, {"noise": "uniform", "mask_token_id": 7}, {"method": "gated-lora"}, "gated-lora: mask_token_id 7 in"),
    # block_size may be in the configuration that an adapter was trained with
    (ADAPTER, {}, {"block_size": 3, "mask_token_id": 9}, {}, "gated-lora: mask_token_id 9"),
]


@pytest.mark.parametrize(("adapter", "config", "training", "options", "expected"), SHOWN)
def test_the_files_show_the_method(
    adapter: Path | None, config: dict[str, Any], training: dict[str, Any], options: dict[str, Any], expected: str
) -> None:
    method, evidence = find_method(Given(ModelFiles(BASE, config), adapter, training, AdoptionRequest(**options)))
    assert f"{method.name}: {evidence}".startswith(expected)


WITHOUT: list[tuple[Path | None, dict[str, Any], str]] = [
    (None, {}, r"names no mask token: expected pard_token, ptd_token_id or mask_token_id in it"),
    (ADAPTER, {}, r"adapter: no mask token is known, and no noise: .*--mask-token .*--method uno"),
    (ADAPTER, {"draft_vocab_size": 32000}, "adapter: config.json has draft_vocab_size, so it drafts with a second"),
    (None, {"dflash_config": {"mask_token_id": 3}}, "has dflash_config, .*: expected medusa, pard, uno, gated-lora"),
    (None, {"pard_token": 9, "pard2_target_dim": 64}, "has pard2_target_dim, so it drafts with a second network"),
    (None, {"mask_token_id": 9, "block_size": 4}, "has block_size, so it drafts blocks whose mask rows see each other"),
]


@pytest.mark.parametrize(("adapter", "config", "message"), WITHOUT)
def test_what_is_missing_or_cannot_be_run_is_named(adapter: Path | None, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_method(Given(ModelFiles(BASE, {} if adapter else config), adapter, config if adapter else {}))
