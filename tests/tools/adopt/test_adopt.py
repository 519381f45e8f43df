"""Adopt: published weights draft as their authors let them draft, and all other rows stay the base model's.

The models of support/published.py predict exactly with the right shift, gate, scale and positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spaceport.exporter.checkpoint import Checkpoint, TokenFlags, load_model, open_checkpoint, quiet_libraries
from spaceport.exporter.checkpoint_files import BASE_FILE, SAR_FILE
from spaceport.exporter.draft_files import EMBEDDINGS_FILE, identity_of
from spaceport.tools.cli import INPUT, OK, USAGE, run
from support.mask_rows import rows_logits
from support.published import BASE, MASK, METHODS, RANK, SLOTS, VOCAB, PublishedModel, text

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
    folder = tmp_path_factory.mktemp("published")
    return cache(lambda method: METHODS[method](folder))


@pytest.fixture(scope="module")
def adopted(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Adopted:
    """The base model of a method and its adapter folder, written once."""
    folder = tmp_path_factory.mktemp("adopted")

    def adopt(method: str) -> tuple[Path, Path]:
        model = published(method)
        assert run(["adopt", *paths_of(model), str(folder / method), *model.options]) == OK
        return model.base, folder / method

    return cache(adopt)


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
def test_an_adopted_adapter_can_be_trained_further_and_heads_cannot(
    adopted: Adopted, tmp_path: Path, capsys: Capture
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "import json", "response": "import os"}\n', "utf-8")
    options = ["--adapter-only", "--method", "gated-lora", "--max-steps", "1", "--batch-size", "1"]
    for method, code in (("medusa", INPUT), ("gated-lora", OK)):
        base, adapter = adopted(method)
        tune = ["tune", str(base), str(tmp_path / "tuned"), str(data), "--adapter", str(adapter)]
        assert run([*tune, *options]) == code
        assert ("has draft_heads, which is not tuned" in capsys.readouterr().err) == (code == INPUT)
    assert opened(base, tmp_path / "tuned").tokens.mask == (MASK,)
