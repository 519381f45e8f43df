"""Mask layouts: bundles of exact models in each layout generate k + 1 tokens per step, and in any other layout they do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.export import ExportOptions
from spaceport.exporter.sar_config import SAR_FILE, CheckpointError
from spaceport.graphs.contract.mask_layout import MaskLayout
from spaceport.graphs.contract.signature import LOWERINGS, Lowering
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decode.draft import Shape
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import OK
from spaceport.tools.verify.acceptance.measure import measure
from spaceport.tools.verify.acceptance.reference_answers import ReferenceAnswer, Segment
from support.exported import bundle_of
from support.hash_engine import LAYOUTS
from support.published import layout_model, text, write_checkpoint

SLOTS = 3
EACH_RUN = (MaskLayout(shift=False, group="block"), "scatter")


def checkpoint_of(layout: MaskLayout, folder: Path, **entries: object) -> Path:
    model, masks = layout_model(layout, SLOTS)
    write_checkpoint(folder, model)
    config = {"mask_tokens": list(map(str, masks)), "shift": layout.shift, "group": layout.group, **entries}
    (folder / SAR_FILE).write_text(json.dumps(config), "utf-8")
    return folder


def tokens_per_step(runtime: Runtime, layout: MaskLayout, shape: Shape = "chain") -> float:
    """Those of a completion whose mask rows have this layout; its text is that of plain decoding."""
    bundle = replace(runtime.bundle, manifest=replace(runtime.bundle.manifest, mask_layout=layout))
    other = Runtime(bundle, runtime.engine, runtime.max_seq_len, costs=runtime.costs)
    plain, drafted = (
        other.generate(text(0, 5), Decoding(max_tokens=33, mask_slots=slots, draft=shape, lookup=0))
        for slots in (0, SLOTS)
    )
    assert list(plain.tokens) == list(drafted.tokens) == text(5, 33)
    return (len(drafted.tokens) - 1) / (drafted.statistics.steps - 1)


CASES = [
    pytest.param(layout, lowering, marks=() if (layout, lowering) == EACH_RUN else pytest.mark.nightly)
    for layout in LAYOUTS
    for lowering in LOWERINGS
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "lowering"), CASES)
def test_an_exact_model_generates_k_plus_1_tokens_per_step_in_its_own_layout_only(
    layout: MaskLayout, lowering: Lowering, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(layout, tmp_path / "checkpoint")
    bundle = bundle_of(checkpoint, ExportOptions(lowering))
    manifest = open_bundle(bundle).manifest
    assert (manifest.mask_layout, manifest.max_mask_slots) == (layout, SLOTS)
    with Runtime.open(bundle, max_seq_len=256, step_costs="free") as runtime:
        assert tokens_per_step(runtime, layout) == tokens_per_step(runtime, layout, "tree") == SLOTS + 1
        for other in set(LAYOUTS) - {layout}:
            if len(manifest.tokens.mask) >= other.rows(SLOTS):
                assert tokens_per_step(runtime, other) < 2
        prompt, answer = tuple(text(0, 5)), tuple(text(5, 13))
        found = measure(runtime, [ReferenceAnswer(1, prompt, (Segment(prompt, answer),))], 13, SLOTS)
        assert found.reference.accuracy == [1.0] * (1 + SLOTS)
        assert found.reference.tokens_per_step[SLOTS] == len(answer) / 4
    assert run(["check", str(bundle), str(checkpoint), "--long-context", "40", "--threads", "1"]) == OK


def test_without_shift_distinct_mask_tokens_are_one_more_than_mask_slots(tmp_path: Path) -> None:
    folder = checkpoint_of(MaskLayout(shift=False), tmp_path / "checkpoint", mask_slots=SLOTS + 1)
    with pytest.raises(CheckpointError, match=r"4 mask slots, but 4 mask tokens: .*; without shift, one more"):
        open_checkpoint(folder, TokenFlags())
