"""Draft origin: a manifest says by which method its model drafts, as far as the files say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.draft_origin import draft_origin
from spaceport.exporter.sar_config import SAR_FILE, CheckpointError


def folder(path: Path, config: dict[str, Any], sar: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    if sar is not None:
        (path / SAR_FILE).write_text(json.dumps(sar), "utf-8")
    return path


@pytest.mark.parametrize(
    ("config", "sar", "flags", "expected"),
    [
        ({}, None, False, {}),
        ({"pard_token": 5}, None, False, {"method": "pard"}),
        ({"pard_token": 5}, None, True, {}),  # another mask token is on the command line
        ({"pard_token": 5}, {"mask_tokens": ["6"]}, False, {}),
        ({"mask_token_id": 5, "block_size": 8}, None, False, {}),  # not read as a mask token of PARD
        ({}, {"mask_tokens": ["6"], "method": "tune"}, False, {"method": "tune"}),
        ({}, {"method": "uno", "adapter": "a/b@1"}, False, {"method": "uno", "adapter": "a/b@1"}),
        ({}, {"method": None, "adapter": None}, False, {}),
    ],
)
def test_the_files_of_a_checkpoint_name_the_method(
    config: dict[str, Any], sar: dict[str, Any] | None, flags: bool, expected: dict[str, str], tmp_path: Path
) -> None:
    assert draft_origin(folder(tmp_path, config, sar), 100, flags) == expected


@pytest.mark.parametrize("value", [5, "", "a\nb", "a" * 201])
def test_an_entry_that_is_no_name_is_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"method is .*: expected null, or a printable text of 1 to 200 characters"
    ):
        draft_origin(folder(tmp_path, {}, {"method": value}), 100, False)
