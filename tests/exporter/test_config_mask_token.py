"""Configuration mask token: config.json names the mask token of a PARD checkpoint, and no other method's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.config_mask_token import config_mask_token
from spaceport.exporter.sar_config import CheckpointError


def written(folder: Path, **entries: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(entries), "utf-8")
    return folder


@pytest.mark.parametrize("name", ["pard_token", "ptd_token_id", "mask_token_id"])
def test_each_entry_names_the_mask_token(name: str, tmp_path: Path) -> None:
    assert config_mask_token(written(tmp_path, **{name: 9}), 10) == 9
    with pytest.raises(
        CheckpointError, match=rf"{name} is 10, the model's vocabulary ends at 9: expected an id within it"
    ):
        config_mask_token(written(tmp_path, **{name: 10}), 10)
    with pytest.raises(CheckpointError, match=rf"{name} is '9': expected a token id"):
        config_mask_token(written(tmp_path, **{name: "9"}), 10)


def test_pards_own_entry_counts_first(tmp_path: Path) -> None:
    assert config_mask_token(written(tmp_path, mask_token_id=1, ptd_token_id=2, pard_token=3), 10) == 3
    assert config_mask_token(written(tmp_path, mask_token_id=None), 10) is None


@pytest.mark.parametrize(
    "other", [{"block_size": 4}, {"dlm_paradigm": "x"}, {"pard2": True}, {"dflash_config": {"a": 1}}]
)
def test_a_mask_token_of_another_method_is_not_taken(other: dict[str, Any], tmp_path: Path) -> None:
    assert config_mask_token(written(tmp_path, mask_token_id=1, **other), 10) is None


def test_a_gguf_file_and_an_adapter_folder_name_none(tmp_path: Path) -> None:
    assert config_mask_token(tmp_path, 10) is None
    assert config_mask_token(tmp_path / "model.gguf", 10) is None
