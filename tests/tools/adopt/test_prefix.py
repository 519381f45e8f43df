"""Prefix: the published numbers of SSD and BiTA are those of the adapter folder, wherever they were found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spaceport.exporter.checkpoint import SAR_FILE, TokenFlags, load_model, open_checkpoint
from spaceport.exporter.preloaded_slots_file import PRELOADED_FILE
from spaceport.exporter.quiet import quiet_libraries
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import OK
from support.gguf_files import random_model
from support.published import write_checkpoint
from support.published_prefix import (
    FILE,
    SLOTS,
    exact_prefix,
    random_embedding,
    random_prefix,
    write_bita,
    write_published_prefix,
)

MASKS = 3
ENCODER = "model.prefix_encoder"


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_libraries()


def adopted(folder: Path, *paths: Path) -> Path:
    assert run(["adopt", *map(str, paths), str(folder / "adapter")]) == OK
    return folder / "adapter"


def require_published_numbers(base: Path, adapter: Path, prefix: Tensor, embedding: Tensor) -> None:
    stored = load_file(adapter / PRELOADED_FILE)
    assert torch.equal(stored["keys"], prefix[:, 0, 0])
    assert torch.equal(stored["values"], prefix[:, 1, 0])
    checkpoint = open_checkpoint(base, TokenFlags(), adapter=adapter)
    rows = load_model(checkpoint, "float32").get_input_embeddings().weight
    assert torch.equal(rows[list(checkpoint.tokens.mask)], embedding)


def test_a_folder_of_ssd_has_the_published_numbers(tmp_path: Path) -> None:
    model = random_model("llama", tied=False)
    base, prefix = write_checkpoint(tmp_path / "base", model), random_prefix(model.config)
    assert prefix.shape[3] == model.config.num_key_value_heads
    embedding = random_embedding(model.config.hidden_size, MASKS)
    published = write_published_prefix(tmp_path / "ssd", prefix, embedding)
    require_published_numbers(base, adopted(tmp_path, base, published), prefix, embedding)


def test_each_layer_of_bita_has_its_own_keys_and_values(tmp_path: Path) -> None:
    """Also with fewer KV heads: the published prefix has a key for each query head."""
    model = random_model("llama", tied=False)
    config = model.config
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    assert heads > config.num_key_value_heads
    prefix = torch.randn((2, 2, 1, heads, 5, dim), generator=torch.Generator().manual_seed(0))
    embedding = random_embedding(config.hidden_size, MASKS)
    whole = write_bita(tmp_path / "whole", model, prefix, embedding)
    require_published_numbers(whole, adopted(tmp_path, whole), prefix, embedding)


def test_one_embedding_of_bita_is_one_token_for_all_mask_slots_and_in_any_shard(tmp_path: Path) -> None:
    model, prefix, embedding = exact_prefix(MASKS)
    whole = write_bita(tmp_path / "whole", model, prefix, embedding[:1], mask_num=MASKS)
    stored = load_file(whole / "model.safetensors")
    rows = stored.pop("model.mask_tokens.weight")
    save_file(stored, whole / "model.safetensors", {"format": "pt"})
    save_file({"model.mask_tokens.weight": rows}, whole / "model-00002-of-00002.safetensors", {"format": "pt"})
    assert run(["adopt", str(whole), str(tmp_path / "adapter"), "--dry-run"]) == OK
    (whole / "model-00002-of-00002.safetensors").unlink()
    save_file({**stored, "model.mask_tokens.weight": rows}, whole / "model.safetensors", {"format": "pt"})
    entries = json.loads((adopted(tmp_path, whole) / SAR_FILE).read_text("utf-8"))
    assert (entries["mask_tokens"], entries["mask_slots"]) == (["<|bita_1|>"], MASKS)


def test_a_projected_prefix_of_bita_is_computed_once(tmp_path: Path) -> None:
    whole = write_bita(tmp_path / "whole", *exact_prefix(MASKS), prefix_projection=True)
    stored = load_file(whole / "model.safetensors")
    width = stored[f"{ENCODER}.embedding.weight"].shape[1]
    dice, hidden, inner = torch.Generator().manual_seed(2), 32, 6
    rows, first, second, bias, second_bias = (
        torch.randn(shape, generator=dice)
        for shape in ((SLOTS, hidden), (inner, hidden), (width, inner), (inner,), (width,))
    )
    stored |= {
        f"{ENCODER}.embedding.weight": rows,
        f"{ENCODER}.trans.0.weight": first,
        f"{ENCODER}.trans.0.bias": bias,
        f"{ENCODER}.trans.2.weight": second,
        f"{ENCODER}.trans.2.bias": second_bias,
    }
    save_file(stored, whole / "model.safetensors", {"format": "pt"})
    expected = (second @ torch.tanh(first @ rows.T + bias[:, None]) + second_bias[:, None]).T
    found = load_file(adopted(tmp_path, whole) / PRELOADED_FILE)["values"][0]  # heads x slots x D
    assert torch.allclose(found.permute(1, 0, 2).reshape(SLOTS, -1), expected[:, width // 2 :], atol=1e-5)


def test_the_file_of_ssd_is_found_in_the_checkpoint_by_itself_or_by_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, prefix, embedding = exact_prefix(MASKS)
    base, whole = (write_checkpoint(tmp_path / name, model) for name in ("base", "whole"))
    published = write_published_prefix(tmp_path / "ssd", prefix, embedding, heads=torch.zeros(2))
    (whole / FILE).symlink_to(published / FILE)
    found = []
    for paths in ([base, published], [base, published / FILE], [whole]):
        capsys.readouterr()
        assert run(["adopt", *map(str, paths), "--dry-run", "--json"]) == OK
        report = json.loads(capsys.readouterr().out)
        assert (report["method"], report["evidence"]) == ("ssd", f"forecast_prefix in {FILE}")
        found.append((report["mask_slots"], report["mask_tokens"], report["prefix"] | {"file": ""}))
    assert found[0] == found[1] == found[2]
    assert found[0][2] == {"file": "", "slots": SLOTS, "tokens": MASKS, "unused": ["heads"]}
