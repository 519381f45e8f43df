"""Preloaded slots: mask rows attend to them and to the text in one softmax, and all other rows stay bit-identical.

The reference is transformers' own model in float64, with the slots as the first entries of its KV cache.
"""

from __future__ import annotations

import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from spaceport.exporter.checkpoint import TokenFlags, load_model, open_checkpoint
from spaceport.exporter.checkpoint_source import quiet_libraries
from spaceport.exporter.mechanisms import write_mechanisms
from spaceport.graphs.attention import PRELOADED_SLOTS, additive_mask, attention_interface, cache_argument
from spaceport.graphs.decoder import decoder_of
from spaceport.graphs.gated import Gate
from spaceport.graphs.preloaded_slots import LayerSlots, PreloadedSlots
from spaceport.graphs.rotation import rotate_model
from spaceport.graphs.traits import UnsupportedModel
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from support.exported import bundle_of
from support.families import FAMILIES, Family, build
from support.gguf_files import random_model
from support.mask_rows import bundle_engine, require_other_mask_rows_alone, rows_batch, torch_engine, walk
from support.paths import TINY

MASKS = (600, 601)
IDS = [*np.random.default_rng(0).integers(5, 590, 8).tolist()]
IDS[4:7] = (600, 601, 600)
VISIBLE = np.tri(8, dtype=np.bool_)
VISIBLE[7, 4:7] = False  # an ordinary row behind a rejected draft
POSITIONS = [0, 1, 2, 3, 4, 5, 6, 4]
MASK_ROWS = np.isin(IDS, MASKS)
TINY_MASK = 4


def random_slots(model: PreTrainedModel, size: float = 1.0) -> PreloadedSlots:
    config = model.config
    dice = torch.Generator().manual_seed(1)
    shape = (config.num_hidden_layers, config.num_key_value_heads, 5, config.head_dim)
    return PreloadedSlots(size * torch.randn(shape, generator=dice), size * torch.randn(shape, generator=dice))


def reference_logits(model: PreTrainedModel, slots: PreloadedSlots) -> NDArray[np.float64]:
    """The logits for IDS of transformers' own model in float64, whose KV cache begins with the slots."""
    model = model.double()
    model.set_attn_implementation("eager")
    cache: Any = DynamicCache(config=model.config)
    for layer, (keys, values) in enumerate(zip(slots.keys.double(), slots.values.double(), strict=True)):
        cache.update(keys[None], values[None], layer)
    sees_slots = np.repeat(MASK_ROWS[:, None], slots.count, axis=1)
    mask = additive_mask(torch.from_numpy(np.concatenate((sees_slots, VISIBLE), axis=1)), torch.float32).double()
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor([IDS]),
            position_ids=torch.tensor([POSITIONS]),
            attention_mask=mask[None, None],
            **cache_argument(model, cache),
        )
    return output.logits[0].numpy()  # type: ignore[no-any-return]


def test_mask_rows_see_the_slots_and_all_other_rows_are_bit_identical() -> None:
    quiet_libraries()
    model, rows = random_model("llama", tied=False), rows_batch(IDS, VISIBLE, POSITIONS)
    slots = random_slots(model)
    without = torch_engine(random_model("llama", tied=False)).run(rows)[0]
    slots.apply(model, MASKS)
    found = torch_engine(model).run(rows)[0]
    assert found[~MASK_ROWS].tobytes() == without[~MASK_ROWS].tobytes()
    expected = reference_logits(random_model("llama", tied=False), slots)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.abs(found - without)[MASK_ROWS].max() > 0.1 * np.abs(expected).max()


def test_slots_are_rotated_with_the_values_of_the_model() -> None:
    rows = rows_batch(IDS, VISIBLE, POSITIONS)
    logits = []
    for rotates in (False, True):
        model = random_model("llama", tied=False)
        random_slots(model).apply(model, MASKS)
        if rotates:
            rotate_model(model)
        logits.append(torch_engine(model).run(rows)[0])
    assert np.abs(logits[1] - logits[0]).max() < 1e-4 * np.abs(logits[0]).max()


@pytest.mark.slow
def test_slots_in_a_bundle_change_mask_rows_only_and_no_text(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "preloaded", ignore=shutil.ignore_patterns("make.py", "__pycache__"))
    write_mechanisms(folder, [random_slots(load_model(open_checkpoint(TINY, TokenFlags()), "float32"), 3.0)])
    bundle = bundle_of(folder)
    assert read_manifest(bundle).drafts.mechanisms == {"preloaded_slots": {"slots": 5}}
    found = require_other_mask_rows_alone(bundle_engine(tiny_bundle), bundle_engine(bundle), TINY_MASK)
    in_torch = walk(torch_engine(load_model(open_checkpoint(folder, TokenFlags()), "float32")), TINY_MASK)[1]
    np.testing.assert_allclose(found, in_torch, atol=1e-3)
    with Runtime.open(bundle, max_seq_len=256, step_costs="free") as runtime:
        for prompt in json.loads((TINY / "prompts.json").read_text("utf-8")).values():
            plain, *drafted = (
                runtime.generate(prompt, Decoding(max_tokens=24, mask_slots=k)).tokens for k in (0, 1, 5)
            )
            assert drafted == [plain, plain]


def attention_by_definition(
    query: Tensor, key: Tensor, value: Tensor, visible: NDArray[np.bool_], softcap: float | None
) -> NDArray[np.float64]:
    """Attention to keys and values of all query heads: rows x heads x D."""
    scores = 0.4 * query @ key.transpose(1, 2)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~torch.from_numpy(visible), -math.inf).softmax(-1)
    return (weights @ value).transpose(0, 1).numpy()


def with_slots(masks: list[bool], keys: Tensor, values: Tensor) -> nn.Module:
    """An attention module with these slots, in a call with these mask rows."""
    gate, module = Gate((7,)), nn.Module()
    gate.rows = torch.tensor(masks)[None, :, None]
    setattr(module, PRELOADED_SLOTS, LayerSlots(gate, keys, values))
    return module


@pytest.mark.parametrize("heads", [2, 4], ids=["slots of KV heads", "slots of query heads"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 5e-3)])
def test_attention_is_that_over_slots_and_text_together(
    dtype: torch.dtype, tolerance: float, window: int | None, softcap: float | None, heads: int
) -> None:
    dice = torch.Generator().manual_seed(3)
    query, key, value, *slots = (
        torch.randn((count, rows, 8), generator=dice, dtype=torch.float64)
        for count, rows in ((4, 5), (2, 9), (2, 9), (heads, 3), (heads, 3))
    )
    masks = np.array([False, True, False, True, True])
    planes = np.stack([np.tri(5, 9, 2, dtype=np.bool_), np.tri(5, 9, 2, dtype=np.bool_) & ~np.tri(5, 9, 0, dtype=bool)])
    module = with_slots(masks.tolist(), slots[0].to(dtype), slots[1].to(dtype))
    keys, values = (
        torch.cat([part.repeat_interleave(4 // len(part), 0) for part in parts], dim=1)
        for parts in ((key, slots[0]), (value, slots[1]))
    )
    seen = np.concatenate((planes[0 if window is None else 1], np.repeat(masks[:, None], 3, axis=1)), axis=1)
    expected = attention_by_definition(query, keys, values, seen, softcap)
    tensors = [part[None].to(dtype) for part in (query, key, value)]
    visible = torch.from_numpy(planes)[None]
    for mask in (visible, additive_mask(visible, dtype)):
        arguments: dict[str, Any] = {"scaling": 0.4, "sliding_window": window, "softcap": softcap}
        output, _ = attention_interface(module, *tensors, mask, **arguments)
        plain, _ = attention_interface(nn.Module(), *tensors, mask, **arguments)
        assert torch.equal(output[0, ~masks], plain[0, ~masks])
        assert np.abs(output[0].double().numpy() - expected).max() < tolerance * np.abs(expected).max()


def test_slots_of_any_numbers_leave_other_rows_as_they_are_and_a_row_may_see_them_alone() -> None:
    dice = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((1, heads, 4, 8), generator=dice) for heads in (4, 2, 2))
    mask = torch.ones((1, 1, 4, 4), dtype=torch.bool)
    mask[0, 0, 1] = False
    plain, _ = attention_interface(nn.Module(), query, key, value, mask)
    for number in (5.0, 1e4, math.inf, math.nan):
        slots = torch.full((2, 3, 8), number)
        found, _ = attention_interface(with_slots([False, True, False, False], slots, slots), query, key, value, mask)
        assert torch.equal(found[0, [0, 2, 3]], plain[0, [0, 2, 3]])
        assert not torch.equal(found[0, 1], plain[0, 1])
        if number == 5.0:
            torch.testing.assert_close(found[0, 1], torch.full((4, 8), 5.0))


def test_a_compared_text_has_no_mask_tokens() -> None:
    model = random_model("llama", tied=False)
    random_slots(model).apply(model, tuple(range(10, model.config.vocab_size)))
    decoder_of(model, "scatter", "plain")


EACH_RUN = ("llama", "mistral", "falcon, 7B style")


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=() if one.name in EACH_RUN else pytest.mark.nightly) for one in FAMILIES],
    ids=str,
)
def test_a_family_uses_the_slots_in_each_layer_or_is_refused(family: Family) -> None:
    """A model with slots is compared with the unmodified one, as in an export."""
    model = build(family)
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slots = torch.ones((config.num_hidden_layers, heads, 3, dim))
    refused = pytest.raises(UnsupportedModel, match=r"layer indices|uses preloaded slots in 0 of")
    with refused if family.structure in ("scaled_dot_product", "eager") else nullcontext():
        PreloadedSlots(slots, slots).apply(model, (5, 6))
        decoder_of(model, "scatter", "plain")


def test_slots_of_another_number_of_layers_are_refused() -> None:
    model = random_model("llama", tied=False)
    slots = random_slots(model)
    with pytest.raises(UnsupportedModel, match=r"layer indices \[0, 1\]: expected 0 to 0, as the preloaded"):
        PreloadedSlots(slots.keys[:1], slots.values[:1]).apply(model, MASKS)
