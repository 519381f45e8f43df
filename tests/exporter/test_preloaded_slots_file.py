"""Preloaded slots file: a folder's file is read again as it was written, and one that does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spaceport.exporter.adapter import write_adapter
from spaceport.exporter.checkpoint import SAR_FILE, TokenFlags, load_model, open_checkpoint
from spaceport.exporter.checkpoint_files import own_files, require_checkpoint
from spaceport.exporter.dry_run import dry_run
from spaceport.exporter.export import ExportOptions
from spaceport.exporter.preloaded_slots_file import PRELOADED_FILE, write_preloaded_slots
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.gated import gate_model
from spaceport.graphs.preloaded_slots import PreloadedSlots, slots_of
from support.gguf_files import HEAD_DIM, HEADS, KV_HEADS, random_model
from support.published import write_checkpoint

SHAPE = (2, KV_HEADS, 3, HEAD_DIM)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("preloaded") / "base", random_model(tied=False))


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """A checkpoint folder whose mask tokens see preloaded slots."""
    for file in base.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / SAR_FILE).write_text(json.dumps({"mask_tokens": ["600", "601"], "mask_slots": 2}), "utf-8")
    slots = torch.randn((2, *SHAPE), generator=torch.Generator().manual_seed(0))
    write_preloaded_slots(tmp_path, PreloadedSlots(slots[0], slots[1]))
    return tmp_path


def test_the_slots_of_a_folder_are_those_of_its_model(folder: Path) -> None:
    checkpoint = open_checkpoint(folder, TokenFlags())
    assert checkpoint.preloaded is not None
    assert checkpoint.preloaded.count == 3
    found = slots_of(load_model(checkpoint, "float32"))
    for layer, slots in enumerate(found):
        assert torch.equal(slots.keys, checkpoint.preloaded.keys[layer])
        assert torch.equal(slots.values, checkpoint.preloaded.values[layer])
        assert slots.gate.mask_ids == (600, 601)
    assert len(found) == 2
    assert folder / PRELOADED_FILE in own_files(folder)
    with pytest.raises(CheckpointError, match=r"preloaded_slots.safetensors: has tensors beside the model"):
        dry_run(folder, ExportOptions())


def test_slots_may_have_a_head_for_each_query_head_and_any_file_name(folder: Path) -> None:
    shape = (2, HEADS, 5, HEAD_DIM)
    save_file({"keys": torch.zeros(shape), "values": torch.zeros(shape)}, folder / "other.safetensors")
    change(folder, prefix="other.safetensors")
    found = open_checkpoint(folder, TokenFlags()).preloaded
    assert found is not None
    assert tuple(found.keys.shape) == shape


def test_a_folder_may_have_slots_and_an_adapter(folder: Path) -> None:
    model = random_model(tied=False)
    adapter = gate_model(model, (600, 601), 2, 4.0, ["q_proj"])
    write_adapter(folder, model, adapter)
    checkpoint = open_checkpoint(folder, TokenFlags())
    assert checkpoint.adapter == adapter
    loaded = load_model(checkpoint, "float32")
    assert {slots.gate for slots in slots_of(loaded)} == {loaded.model.layers[0].self_attn.q_proj.gate}


def test_a_file_of_slots_is_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights in it"):
        require_checkpoint(folder)


def change(folder: Path, **entries: Any) -> None:
    file = folder / SAR_FILE
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **entries}), "utf-8")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"prefix": 4}, r"prefix is 4: expected the name of a safetensors file in this folder, or null"),
        ({"prefix": "../preloaded_slots.safetensors"}, r"expected the name of a safetensors file in this folder"),
        ({"prefix": "slots.pt"}, r"prefix is 'slots.pt': expected the name of a safetensors file"),
        ({"prefix": "lost.safetensors"}, r"names the prefix lost.safetensors, which is not there: copy the file"),
        ({"mask_tokens": [], "mask_slots": None}, r"names a prefix, .* but no mask token is known: set one with"),
        ({"prefix": "tokenizer.safetensors"}, r"tokenizer.safetensors: cannot be read"),
    ],
)
def test_an_entry_that_names_no_slots_is_refused(entries: dict[str, Any], message: str, folder: Path) -> None:
    (folder / "tokenizer.safetensors").write_text("{}")
    change(folder, **entries)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder, TokenFlags())


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        ((1, *SHAPE[1:]), None, rf"has keys of shape \(1, .*: expected 2 x {KV_HEADS} or {HEADS} x slots x {HEAD_DIM}"),
        ((2, 3, 3, HEAD_DIM), None, "which are layers, heads, slots and head size of the model"),
        ((*SHAPE[:3], HEAD_DIM + 1), None, "expected 2 x"),
        ((*SHAPE[:2], 0, HEAD_DIM), None, "expected 2 x"),
        (SHAPE[1:], None, "expected 2 x"),
        (SHAPE, (*SHAPE[:2], 4, HEAD_DIM), r"and values of shape \(2, \d, 4, "),
    ],
)
def test_slots_of_other_sizes_are_refused(
    keys: tuple[int, ...], values: tuple[int, ...] | None, message: str, folder: Path
) -> None:
    save_file({"keys": torch.zeros(keys), "values": torch.ones(values or keys)}, folder / PRELOADED_FILE)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder, TokenFlags())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"keys": torch.zeros(SHAPE)}, r"has the tensors keys: expected keys and values"),
        ({"keys": torch.zeros(SHAPE), "values": torch.full(SHAPE, torch.nan)}, r"has numbers that are not finite"),
    ],
)
def test_a_file_with_other_content_is_refused(tensors: dict[str, Any], message: str, folder: Path) -> None:
    save_file(tensors, folder / PRELOADED_FILE)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder, TokenFlags())


def test_numbers_beyond_the_range_of_a_type_are_refused(folder: Path) -> None:
    save_file({"keys": torch.zeros(SHAPE), "values": torch.full(SHAPE, 1e5)}, folder / PRELOADED_FILE)
    checkpoint = open_checkpoint(folder, TokenFlags())
    assert slots_of(load_model(checkpoint, "bfloat16"))
    with pytest.raises(CheckpointError, match="has numbers beyond the range of float16: export with --dtype bfloat16"):
        load_model(checkpoint, "float16")
