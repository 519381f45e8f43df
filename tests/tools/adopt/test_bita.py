"""BiTA: the prefix in a whole checkpoint drafts in a bundle, and the text stays the base model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spaceport.exporter.checkpoint import SAR_FILE, TokenFlags, load_model, open_checkpoint
from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.preloaded_slots_file import PRELOADED_FILE
from spaceport.exporter.quiet import quiet_libraries
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, OK, USAGE
from support.gguf_files import random_model
from support.published import text
from support.published_prefix import SLOTS, exact_prefix, random_embedding, random_prefix, write_bita

MASKS = 3
ENCODER = "model.prefix_encoder"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet_libraries()
    return write_bita(tmp_path_factory.mktemp("bita") / "whole", *exact_prefix(MASKS))


def changed(whole: Path, folder: Path, tensors: dict[str, Tensor | None], **entries: Any) -> Path:
    """A copy of a checkpoint with other tensors and entries; None removes one."""
    folder.mkdir()
    for file in whole.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text("utf-8")) | entries
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    stored = {**load_file(folder / "model.safetensors"), **tensors}
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.slow
def test_an_exact_prefix_drafts_all_tokens_of_a_step_and_the_text_is_the_base_models(
    whole: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert run(["adopt", str(whole), str(tmp_path / "adapter")]) == OK
    shown = capsys.readouterr().out
    assert "BiTA: a prefix that only mask rows see; shown by prompt_num in config.json" in shown
    assert f"{SLOTS} key/value pairs per layer and {MASKS} mask tokens in {whole}" in shown
    export(whole, tmp_path / "bundle", ExportOptions(adapter=tmp_path / "adapter"))
    manifest = read_manifest(tmp_path / "bundle")
    assert (manifest.preloaded_slots, manifest.max_mask_slots, len(manifest.tokens.mask)) == (SLOTS, MASKS, MASKS)
    assert manifest.draft_method == "bita"
    with Runtime.open(tmp_path / "bundle", max_seq_len=256, step_costs="free") as runtime:
        for masks, steps in ((0, 32), (MASKS, 8)):
            found = runtime.generate(text(0, 5), Decoding(max_tokens=33, lookup=0, mask_slots=masks, draft="chain"))
            assert list(found.tokens) == text(5, 33)
            assert found.statistics.steps - 1 == steps


def test_each_layer_has_its_own_keys_and_values(tmp_path: Path) -> None:
    """Also with fewer KV heads: the published prefix has a key for each query head."""
    quiet_libraries()
    model = random_model("llama", tied=False)
    config = model.config
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    assert heads > config.num_key_value_heads
    prefix = torch.randn((2, 2, 1, heads, 5, dim), generator=torch.Generator().manual_seed(0))
    embedding = random_embedding(config.hidden_size, MASKS)
    whole = write_bita(tmp_path / "whole", model, prefix, embedding)
    assert run(["adopt", str(whole), str(tmp_path / "adapter")]) == OK
    stored = load_file(tmp_path / "adapter" / PRELOADED_FILE)
    assert torch.equal(stored["keys"], prefix[:, 0, 0])
    assert torch.equal(stored["values"], prefix[:, 1, 0])
    checkpoint = open_checkpoint(whole, TokenFlags(), adapter=tmp_path / "adapter")
    rows = load_model(checkpoint, "float32").get_input_embeddings().weight
    assert torch.equal(rows[list(checkpoint.tokens.mask)], embedding)


def test_one_embedding_is_one_token_for_all_mask_slots(whole: Path, tmp_path: Path) -> None:
    embedding = exact_prefix(MASKS)[2][:1]
    shared = changed(whole, tmp_path / "shared", {"model.mask_tokens.weight": embedding}, mask_diff=False)
    assert run(["adopt", str(shared), str(tmp_path / "adapter")]) == OK
    entries = json.loads((tmp_path / "adapter" / SAR_FILE).read_text("utf-8"))
    assert (entries["mask_tokens"], entries["mask_slots"]) == (["<|bita_1|>"], MASKS)


def test_a_projected_prefix_is_computed_once(whole: Path, tmp_path: Path) -> None:
    plain = load_file(whole / "model.safetensors")[f"{ENCODER}.embedding.weight"]
    dice = torch.Generator().manual_seed(2)
    hidden, inner = 32, 6
    rows, first = (torch.randn(shape, generator=dice) for shape in ((SLOTS, hidden), (inner, hidden)))
    second = torch.randn((plain.shape[1], inner), generator=dice)
    biases = [torch.randn(size, generator=dice) for size in (inner, plain.shape[1])]
    tensors: dict[str, Tensor | None] = {
        f"{ENCODER}.embedding.weight": rows,
        f"{ENCODER}.trans.0.weight": first,
        f"{ENCODER}.trans.0.bias": biases[0],
        f"{ENCODER}.trans.2.weight": second,
        f"{ENCODER}.trans.2.bias": biases[1],
    }
    projected = changed(whole, tmp_path / "projected", tensors, prefix_projection=True)
    assert run(["adopt", str(projected), str(tmp_path / "adapter")]) == OK
    expected = (second @ torch.tanh(first @ rows.T + biases[0][:, None]) + biases[1][:, None]).T
    found = load_file(tmp_path / "adapter" / PRELOADED_FILE)["values"][0]  # heads x slots x D
    assert torch.allclose(found.permute(1, 0, 2).reshape(SLOTS, -1), expected[:, plain.shape[1] // 2 :], atol=1e-5)


@pytest.mark.parametrize(
    ("tensors", "entries", "message"),
    [
        (
            {f"{ENCODER}.embedding.weight": None},
            {},
            "no tensor is named prefix_encoder.embedding.weight: expected one in",
        ),
        ({"model.mask_tokens.weight": None}, {}, "no tensor is named mask_tokens.weight: expected one beside"),
        ({}, {"prompt_num": 15}, "has the shape (16, 64): expected 15 x 64, which are prompt_num in config.json"),
        ({}, {"prompt_num": "x"}, "prompt_num is 'x': expected a whole number"),
        ({}, {"pard_token": 638}, "has mask tokens, which draft already: expected a base model without them"),
        ({}, {"mask_num": 0}, "mask_num is 0: expected a whole number"),
        ({}, {"mask_num": 4}, "mask_tokens.weight has 3 rows: expected 1, or 4 as mask_num in config.json"),
        ({}, {"prefix_projection": True}, "no tensor is named prefix_encoder.trans.0.weight"),
        (
            {"model.mask_tokens.weight": torch.zeros(3, 31)},
            {},
            "has the shape (3, 31): expected finite numbers, tokens x 32",
        ),
        ({f"{ENCODER}.embedding.weight": torch.full((16, 64), torch.nan)}, {}, "has numbers that are not finite"),
    ],
)
def test_a_prefix_that_does_not_fit_is_refused(
    tensors: dict[str, Tensor | None],
    entries: dict[str, Any],
    message: str,
    whole: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    folder = changed(whole, tmp_path / "changed", tensors, **entries)
    assert run(["adopt", str(folder), str(tmp_path / "adapter")]) == INPUT
    assert message in capsys.readouterr().err
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-mask-slots", "4"], "--max-mask-slots is 4: expected 1 to 3"),
        (["--mask-token", "638"], "--mask-token has no effect: the checkpoint has mask tokens of its own"),
        (["--noise-seed", "1"], "--noise-seed has no effect"),
    ],
)
def test_options_without_effect_are_refused(options: list[str], message: str, whole: Path, capsys: Capture) -> None:
    assert run(["adopt", str(whole), "--dry-run", *options]) == USAGE
    assert message in capsys.readouterr().err


def test_numbers_of_a_prefix_are_read_from_any_shard(whole: Path, tmp_path: Path) -> None:
    config = random_model("llama", tied=False).config
    assert random_prefix(config).shape[3] == config.num_key_value_heads  # SSD's has those of KV heads
    moved = changed(whole, tmp_path / "moved", {"model.mask_tokens.weight": None})
    embedding = exact_prefix(MASKS)[2]
    save_file({"model.mask_tokens.weight": embedding}, moved / "model-00002-of-00002.safetensors", {"format": "pt"})
    assert run(["adopt", str(moved), "--dry-run"]) == OK
