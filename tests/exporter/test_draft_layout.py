"""Draft layout: entries of sar_config.json about mask slots are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.draft_layout import DraftLayout, Noise, layout_entries, read_draft_layout
from spaceport.exporter.sar_config import SAR_FILE, CheckpointError


def written(folder: Path, **entries: Any) -> Path:
    (folder / SAR_FILE).write_text(json.dumps(entries), "utf-8")
    return folder


def test_without_entries_mask_slots_are_causal_and_with_shift(tmp_path: Path) -> None:
    assert read_draft_layout(tmp_path) == DraftLayout(shift=True, group="causal", noise=None)
    assert read_draft_layout(written(tmp_path, mask_tokens=["[M]"])) == DraftLayout()


def test_a_layout_that_is_written_is_read_again(tmp_path: Path) -> None:
    layout = DraftLayout(shift=False, group="block", noise=Noise((7, 3), 5))
    assert read_draft_layout(written(tmp_path, mask_tokens=["a", "b"], **layout_entries(layout))) == layout


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"shift": 1}, r"shift is 1: expected true or false"),
        ({"group": "tree"}, r"group is 'tree': expected causal or block"),
        ({"noise": {"ids": [1, 2], "seed": 0}}, r"expected null, or ids, one for each of the 1 mask_tokens, and seed"),
        ({"noise": {"ids": [-1], "seed": 0}}, r"noise is .*: expected null, or ids"),
        ({"noise": {"ids": [1]}}, r"noise is .*: expected null, or ids"),
        ({"noise": "uniform"}, r"noise is 'uniform': expected null, or ids"),
    ],
)
def test_invalid_entries_are_refused(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_draft_layout(written(tmp_path, mask_tokens=["[M]"], **entries))
