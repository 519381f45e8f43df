"""Adopt: published weights draft as their authors let them draft, and all other rows stay the base model's.

The models of support/published_methods.py predict exactly with the right shift, gate, scale and positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spaceport.exporter.adapter_folder import BASE_FILE, EMBEDDINGS_FILE, identity_of
from spaceport.exporter.checkpoint import SAR_FILE, Checkpoint, TokenFlags, load_model, open_checkpoint
from spaceport.exporter.checkpoint_source import quiet_libraries
from spaceport.exporter.sar_config import CheckpointError
from spaceport.tools.cli import INPUT, OK, USAGE, run
from support.mask_rows import rows_logits
from support.published import MASK, VOCAB, random_base, text, write_checkpoint
from support.published_drafts import BASE
from support.published_methods import METHODS, RANK, SLOTS, PublishedModel

ADAPTER_FILE = "mask_adapter.safetensors"
HEADS_FILE = "draft_heads.safetensors"

Capture = pytest.CaptureFixture[str]
Published = Callable[[str], PublishedModel]
Adopted = Callable[[str], tuple[Path, Path]]
HEADS: dict[str, Any] = {"mechanisms": {"draft_heads": {"count": 3, "blocks": 1}}}
ADAPTER_FILES = {ADAPTER_FILE, BASE_FILE, EMBEDDINGS_FILE, SAR_FILE}


def lora(alpha: float) -> dict[str, Any]:
    return {"mechanisms": {"mask_adapter": {"rank": RANK, "alpha": alpha, "targets": ["fc2"]}}}


def masks(name: str) -> list[str]:
    return [f"<|{name}_{number}|>" for number in range(1, SLOTS + 1)]


# For each method that writes a folder: its files, its mask tokens, the name of its weights, and other entries.
FOLDERS: dict[str, tuple[set[str], list[str], str, dict[str, Any]]] = {
    "gated-lora": (ADAPTER_FILES, [str(MASK)], "lora", lora(2.0 * RANK)),
    "uno": (ADAPTER_FILES, masks("noise"), "uno/adapter", lora(24 * RANK**0.5)),  # rsLoRA: alpha / sqrt(rank)
    "medusa": ({BASE_FILE, EMBEDDINGS_FILE, HEADS_FILE, SAR_FILE}, [], "medusa", HEADS),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """The model of a method, written once."""
    quiet_libraries()
    folder, found = tmp_path_factory.mktemp("published"), dict[str, PublishedModel]()
    return lambda method: found[method] if method in found else found.setdefault(method, METHODS[method](folder))


@pytest.fixture(scope="module")
def adopted(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Adopted:
    """The base model of a method and its adapter folder, written once."""
    folder = tmp_path_factory.mktemp("adopted")

    def adopt(method: str) -> tuple[Path, Path]:
        model, target = published(method), folder / method
        if not target.exists():
            assert run(["adopt", *paths_of(model), str(target), *model.options]) == OK
        return model.base, target

    return adopt


def paths_of(model: PublishedModel) -> list[str]:
    return [str(path) for path in (model.base, model.weights) if path is not None]


def opened(base: Path, adapter: Path | None = None) -> Checkpoint:
    return open_checkpoint(base, TokenFlags(), adapter=adapter)


@pytest.mark.parametrize("method", ["pard", "gated-lora", "uno"])
def test_mask_rows_predict_all_tokens_and_no_other_row_changes(
    method: str, published: Published, adopted: Adopted
) -> None:
    base, adapter = (published(method).base, None) if method == "pard" else adopted(method)
    checkpoint = opened(base, adapter)
    ids = [*text(0, 12), *(checkpoint.tokens.mask * SLOTS)[:SLOTS]]
    found = rows_logits(load_model(checkpoint, "float32"), ids)[:, :VOCAB]
    assert found[11:].argmax(-1).tolist() == text(12, SLOTS + 1)
    plain = rows_logits(load_model(opened(base), "float32"), ids)[:, :VOCAB]
    assert np.array_equal(found[:12], plain[:12])
    if method == "gated-lora":
        assert not set(plain[12:].argmax(-1).tolist()) & set(text(13, SLOTS))


def test_heads_predict_all_tokens_and_no_row_changes(adopted: Adopted) -> None:
    base, adapter = adopted("medusa")
    model = load_model(opened(base, adapter), "float32")
    lines = rows_logits(model, text(0, 12))
    assert [*lines.reshape(12, 1 + SLOTS, -1).argmax(-1)[5]] == text(6, 1 + SLOTS)
    assert np.array_equal(lines[:: 1 + SLOTS], rows_logits(load_model(opened(base), "float32"), text(0, 12)))


@pytest.mark.parametrize("method", FOLDERS)
def test_an_adapter_folder_says_how_it_drafts(method: str, adopted: Adopted) -> None:
    base, adapter = adopted(method)
    files, tokens, name, entries = FOLDERS[method]
    assert {file.name for file in adapter.iterdir()} == files
    found = json.loads((adapter / SAR_FILE).read_text("utf-8"))
    noise = found.pop("noise", None)
    slots = {"mask_slots": SLOTS} if tokens else {}
    assert found == {"mask_tokens": tokens, "method": method, "adapter": name, **slots, **entries}
    assert (noise is not None) == (method == "uno")
    # adopting reads the matrices of the base model one by one
    identity = identity_of(base.name, load_model(opened(base), "float32"))
    assert json.loads((adapter / BASE_FILE).read_text("utf-8"))["base"] == asdict(identity)


def test_noise_rows_are_copies_of_rows_that_the_seed_selects(
    adopted: Adopted, published: Published, tmp_path: Path, capsys: Capture
) -> None:
    base, adapter = adopted("uno")
    checkpoint = opened(base, adapter)
    ids = json.loads((adapter / SAR_FILE).read_text("utf-8"))["noise"]["ids"]
    assert all(1 <= token < 300 for token in ids)  # below the mask token of the training
    model = load_model(checkpoint, "float32")
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        rows: Any = table.weight
        assert torch.equal(rows[list(checkpoint.tokens.mask)], rows[ids])
    assert set(load_file(adapter / EMBEDDINGS_FILE)["ids"].tolist()) == set(checkpoint.tokens.mask)
    found = []
    for seed in (0, 0, 1):
        options = ["--json", "--overwrite", "--noise-seed", str(seed), "--max-mask-slots", "7"]
        capsys.readouterr()
        assert run(["adopt", *paths_of(published("uno")), str(tmp_path / "adapter"), *options]) == OK
        found.append(json.loads(capsys.readouterr().out)["noise"]["ids"])
    assert found[0] == found[1] != found[2]
    assert all(len(set(ids)) == 7 for ids in found)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("gated-lora", [f"mask_token_id {MASK}", f"rank {RANK}, scale 2, 1 modules", "no TARGET"]),
        ("medusa", [BASE, "3 of 3 in", "config.json names 2", "no TARGET: expected"]),
        ("pard", [f"pard_token {MASK} in config.json", "BUNDLE --max-mask-slots 3", "needs no TARGET"]),
    ],
)
def test_the_report_names_what_was_found(
    method: str, expected: list[str], published: Published, tmp_path: Path, capsys: Capture
) -> None:
    model = published(method)
    adopt, target = ["adopt", *paths_of(model), *model.options], [str(tmp_path / "target")]
    right, wrong = ([], target) if method == "pard" else (target, [])
    assert run([*adopt, *wrong]) == USAGE
    assert expected[-1] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert run([*adopt, *right]) == OK
    shown = capsys.readouterr().out
    assert all(words in shown for words in expected[:-1])
    assert run([*adopt, *right, "--overwrite", "--json"]) == OK
    report = json.loads(capsys.readouterr().out)
    files = sorted(FOLDERS[method][0]) if right else []
    assert (report["method"], report["written"]) == (method, files)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "refused"),
    [("gated-lora", None), ("medusa", "has draft_heads, which is not tuned")],
)
def test_an_adopted_adapter_can_be_trained_further(
    method: str, refused: str | None, adopted: Adopted, tmp_path: Path, capsys: Capture
) -> None:
    base, adapter = adopted(method)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "import json", "response": "import os"}\n', "utf-8")
    options = ["--adapter", str(adapter), "--adapter-only", "--method", "gated-lora"]
    tune = ["tune", str(base), str(tmp_path / "tuned"), str(data), *options, "--max-steps", "1", "--batch-size", "1"]
    assert run(tune) == (INPUT if refused else OK)
    if refused:
        assert refused in capsys.readouterr().err
    else:
        assert opened(base, tmp_path / "tuned").tokens.mask == (MASK,)


def test_an_adapter_needs_the_base_model_that_it_was_adopted_for(adopted: Adopted, tmp_path: Path) -> None:
    base, adapter = adopted("gated-lora")
    model = load_model(opened(base), "float32")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.01)
    other = write_checkpoint(tmp_path / "other", model)
    with pytest.raises(CheckpointError, match="expected that model as base, neither fine-tuned nor quantized"):
        load_model(opened(other, adapter), "float32")
    with pytest.raises(CheckpointError, match=rf"the adapter was trained on {base.name} with"):
        opened(write_checkpoint(tmp_path / "third", random_base()), adapter)
