"""Published numbers: adapter folders have those of peft, as in its own forward pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spaceport.exporter.checkpoint import TokenFlags, load_model, open_checkpoint, quiet_libraries
from spaceport.exporter.checkpoint_files import SAR_FILE
from spaceport.tools.adopt.adapters import WEIGHTS_FILE
from spaceport.tools.cli import OK, run
from support.gguf_files import random_model, write_gguf
from support.published import MASK, VOCAB, random_adapter, random_base, reference_logits, write_checkpoint

ADAPTER_FILE = "mask_adapter.safetensors"


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = r".*layers\.\d+\.self_attn\.(q|k|v|o)_proj"
UP = "model.layers.0.mlp.up_proj"

# Ways in which peft selects modules, ranks and scales.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": LINEAR},
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "all-linear": {"r": 2, "lora_alpha": 3, "target_modules": "all-linear"},
    "regex": {"r": 4, "lora_alpha": 4, "target_modules": ATTENTION},
    "one layer": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {"q_proj": 8, r"layers\.0\.mlp\.up_proj": 2},
        "alpha_pattern": {"v_proj": 3},
    },
    "patterns and rslora": {
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["q_proj", "up_proj"],
        "rank_pattern": {"up_proj": 9},
        "exclude_modules": r".*layers\.1\.mlp\.up_proj",
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet_libraries()
    return write_checkpoint(tmp_path_factory.mktemp("peft") / "base", random_base(), mask_token_id=MASK)


def text_with_masks() -> Tensor:
    """A text with a group of mask rows at its end, and one in its middle."""
    ids = torch.arange(40)[None] * 7 % VOCAB
    ids[:, 10:12] = MASK
    ids[:, 36:] = MASK
    return ids


def opened_logits(base: Path, adapter: Path, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = load_model(open_checkpoint(base, TokenFlags(), adapter=adapter), "float32")(ids).logits
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_mask_rows_have_the_logits_of_pefts_own_forward_pass(name: str, base: Path, tmp_path: Path) -> None:
    model, ids = random_base(), text_with_masks()
    adapted = random_adapter(model, **OPTIONS[name])
    adapted.save_pretrained(tmp_path / "published")
    assert run(["adopt", str(base), str(tmp_path / "published"), str(tmp_path / "adapter")]) == OK
    found, masks = opened_logits(base, tmp_path / "adapter", ids), ids == MASK
    torch.testing.assert_close(found, reference_logits(adapted, ids, masks.float()), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        plain = model(ids).logits
    assert torch.equal(found[:, :10], plain[:, :10])
    assert (found - plain)[masks].abs().amax(-1).min() > 0.1
    if name == "one layer":
        names = {module.rpartition(".")[0] for module in load_file(tmp_path / "adapter" / ADAPTER_FILE)}
        assert names == {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"}
        entry = json.loads((tmp_path / "adapter" / SAR_FILE).read_text("utf-8"))["mechanisms"]["mask_adapter"]
        assert set(entry["targets"]) == names


def test_the_values_of_the_adapter_are_kept_as_they_are(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "published" / WEIGHTS_FILE
    random_adapter(random_base(), **OPTIONS["plain"]).save_pretrained(file.parent)
    tensors = {name: tensor.bfloat16() * 1e-4 for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    assert run(["adopt", str(base), str(file.parent), str(tmp_path / "adapter")]) == OK
    stored = load_file(tmp_path / "adapter" / ADAPTER_FILE)
    for half in ("A", "B"):
        assert stored[f"{UP}.{half}"].dtype == torch.bfloat16
        assert torch.equal(stored[f"{UP}.{half}"], tensors[f"base_model.model.{UP}.lora_{half}.weight"])


def test_a_gguf_file_can_be_the_base_model(tmp_path: Path) -> None:
    quiet_libraries()
    model, ids = random_model(), text_with_masks()
    base = write_gguf(tmp_path / "model.gguf", model)
    adapted = random_adapter(model, **OPTIONS["rslora"])
    adapted.save_pretrained(tmp_path / "published")
    paths = [str(base), str(tmp_path / "published"), str(tmp_path / "adapter")]
    assert run(["adopt", *paths, "--mask-token", "[M]"]) == OK
    (mask,) = open_checkpoint(base, TokenFlags(), adapter=tmp_path / "adapter").tokens.mask
    ids[ids == MASK] = mask
    expected = reference_logits(adapted, ids, (ids == mask).float())
    torch.testing.assert_close(opened_logits(base, tmp_path / "adapter", ids), expected, rtol=1e-4, atol=1e-4)
