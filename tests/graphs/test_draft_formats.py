"""Draft formats: adapters, preloaded slots and heads in bundles of every format, and in the graphs of several families."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from spaceport.exporter.adapter import write_adapter
from spaceport.exporter.checkpoint import SAR_FILE
from spaceport.exporter.preloaded_slots_file import write_preloaded_slots
from spaceport.exporter.quiet import quiet_libraries
from spaceport.graphs.gated import ALL_LINEAR, adapter_state, gate_model
from spaceport.graphs.preloaded_slots import PreloadedSlots
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import OK
from support.gguf_files import HEAD_DIM, HIDDEN, KV_HEADS, random_model
from support.mask_rows import bundle_engine, require_other_mask_rows_alone
from support.published import write_checkpoint
from support.published_heads import random_heads, write_published_heads

pytestmark = pytest.mark.nightly
MASK = 4
FORMATS = [
    [],
    ["--weights", "int8"],
    ["--weights", "int8", "--activations", "int8"],
    ["--weights", "int4"],
    ["--weights", "int4", "--activations", "float"],
    ["--weights", "float8"],
    ["--dtype", "float16"],
    ["--lowering", "append"],
    ["--lowering", "append", "--weights", "int8"],
    ["--lowering", "append", "--weights", "int4", "--dtype", "float16"],
]


def random_checkpoint(folder: Path, family: str, tied: bool = False) -> tuple[Path, PreTrainedModel]:
    """A checkpoint whose mask token drafts, and its model."""
    model = random_model(family, tied)
    write_checkpoint(folder, model)
    (folder / SAR_FILE).write_text(json.dumps({"mask_tokens": [str(MASK)], "mask_slots": 3}), "utf-8")
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def add_adapter(folder: Path, model: PreTrainedModel) -> None:
    adapter = gate_model(model, [MASK], 4, 8, [ALL_LINEAR])
    dice = torch.Generator().manual_seed(3)
    for half in adapter_state(model).values():
        half.copy_(0.2 * torch.randn(half.shape, generator=dice))
    write_adapter(folder, model, adapter)


def add_slots(folder: Path, model: PreTrainedModel, size: float = 1.0) -> None:
    dice = torch.Generator().manual_seed(1)
    shape = (model.config.num_hidden_layers, KV_HEADS, 5, HEAD_DIM)
    write_preloaded_slots(folder, PreloadedSlots(*(size * torch.randn(shape, generator=dice) for _ in range(2))))


def add_large_slots(folder: Path, model: PreTrainedModel) -> None:
    add_slots(folder, model, 1e4)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_libraries()


@pytest.mark.parametrize("options", FORMATS, ids=" ".join)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("add", [add_adapter, add_slots, add_large_slots])
def test_adapters_and_slots_change_no_bit_of_ordinary_rows(
    add: Any, family: str, options: list[str], tmp_path: Path
) -> None:
    plain, model = random_checkpoint(tmp_path / "base", family)
    drafting = shutil.copytree(plain, tmp_path / "drafting")
    add(drafting, model)
    bundles = [tmp_path / "plain", tmp_path / "bundle"]
    for checkpoint, bundle in zip((plain, drafting), bundles, strict=True):
        assert run(["export", str(checkpoint), str(bundle), *options]) == OK
    require_other_mask_rows_alone(*map(bundle_engine, bundles), MASK, 0.05)
    with Runtime.open(bundles[1], max_seq_len=128, step_costs="free") as runtime:
        found = [
            runtime.generate("import os", Decoding(max_tokens=24, mask_slots=slots, draft="chain")).tokens
            for slots in (0, 3)
        ]
    assert found[0] == found[1]


@pytest.mark.parametrize("options", FORMATS, ids=" ".join)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("add", [add_adapter, add_slots, None])
def test_rows_with_adapters_slots_or_heads_have_the_logits_of_pytorch(
    add: Any, tied: bool, options: list[str], tmp_path: Path
) -> None:
    checkpoint, model = random_checkpoint(tmp_path / "base", "llama", tied)
    adapter = []
    if add is None:
        (checkpoint / SAR_FILE).unlink()
        published = write_published_heads(tmp_path / "heads", random_heads(3, 1, HIDDEN, model.config.vocab_size))
        adapter = ["--adapter", str(tmp_path / "adapter")]
        assert run(["adopt", str(checkpoint), str(published), str(tmp_path / "adapter")]) == OK
    else:
        add(checkpoint, model)
    bundle = str(tmp_path / "bundle")
    assert run(["export", str(checkpoint), bundle, *adapter, *options]) == OK
    assert run(["check", bundle, str(checkpoint), *adapter, "--long-context", "40", "--threads", "1"]) == OK
