"""Adopt: published weights draft as their authors let them draft, and all other rows stay the base model's.

The models of support/published.py predict exactly with the right shift, gate, scale and positions.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from spaceport.exporter.checkpoint import SAR_FILE, Checkpoint, TokenFlags, load_model, open_checkpoint, quiet_libraries
from spaceport.exporter.checkpoint_files import BASE_FILE
from spaceport.exporter.draft_files import EMBEDDINGS_FILE, identity_of
from spaceport.exporter.export import ExportOptions
from spaceport.graphs.contract.formats import FORMATS
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.adopt.adapters import WEIGHTS_FILE
from spaceport.tools.cli import INPUT, OK, USAGE, run
from support.exported import bundle_of
from support.gguf_files import random_model, write_gguf
from support.mask_rows import bundle_engine, rows_batch, rows_logits, walk
from support.published import (
    BASE,
    MASK,
    METHODS,
    RANK,
    SLOTS,
    VOCAB,
    PublishedModel,
    random_adapter,
    random_base,
    random_heads,
    reference_logits,
    text,
    write_checkpoint,
    write_published_heads,
)

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
        found: Tensor = load_model(opened(base, adapter), "float32")(ids).logits
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
    (mask,) = opened(base, tmp_path / "adapter").tokens.mask
    ids[ids == MASK] = mask
    expected = reference_logits(adapted, ids, (ids == mask).float())
    torch.testing.assert_close(opened_logits(base, tmp_path / "adapter", ids), expected, rtol=1e-4, atol=1e-4)


FORMATS_OF_DRAFTS = [
    *(
        ExportOptions(FORMATS[name])
        for name in ("float32", "float16", "int8", "int4", "float16-int4", "float16-float8")
    ),
    ExportOptions(requested_lowering="append"),
]


def publish(method: str, folder: Path, model: PreTrainedModel) -> list[str]:
    """Write weights of a method for a model; the options with which they are adopted."""
    if method == "heads":
        write_published_heads(folder, random_heads(3, 1, model.config.hidden_size, VOCAB))
        return []
    random_adapter(model, r=4, lora_alpha=8, target_modules="all-linear").save_pretrained(folder)
    return ["--method", "uno", "--max-mask-slots", "1"]


@pytest.mark.nightly
@pytest.mark.parametrize("options", FORMATS_OF_DRAFTS, ids=lambda options: f"{options.format.name}-{options.lowering}")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["adapter", "heads"])
def test_drafts_have_the_logits_of_pytorch_and_change_no_other_row(
    method: str, tied: bool, options: ExportOptions, tmp_path: Path
) -> None:
    quiet_libraries()
    base = write_checkpoint(tmp_path / "base", random_model("llama", tied))
    adapter, arguments = tmp_path / "adapter", publish(method, tmp_path / "published", random_model("llama", tied))
    assert run(["adopt", str(base), str(tmp_path / "published"), str(adapter), *arguments]) == OK
    bundle = shutil.copytree(bundle_of(base, replace(options, adapter=adapter)), tmp_path / "bundle")
    long = ["--long-context", "40", "--threads", "1"]
    assert run(["check", str(bundle), str(base), "--adapter", str(adapter), *long]) == OK
    plain, drafting = bundle_engine(bundle_of(base, options)), bundle_engine(bundle)
    if method == "heads" and options == ExportOptions() and not tied:
        rows = rows_batch(torch.randint(0, 600, (20,), generator=torch.Generator().manual_seed(0)).tolist())
        assert np.array_equal(drafting.run(rows)[:, ::4], plain.run(rows))
    elif method != "heads":
        (ordinary, drafted), (same, other) = walk(plain, 4, range(5, VOCAB)), walk(drafting, MASK, range(5, VOCAB))
        if (
            options.format.name == options.format.dtype
        ):  # others are rounded on sampled texts, which the added tokens change
            assert ordinary.tobytes() == same.tobytes()
        assert np.isfinite(other).all()
        assert (np.abs(drafted - other).max(axis=-1) > 0.05).all()
    with Runtime.open(bundle, max_seq_len=128, step_costs="free") as runtime:
        decoding = Decoding(max_tokens=24, draft="chain")
        expected = runtime.generate("import os", Decoding(max_tokens=24, mask_slots=0))
        assert runtime.generate("import os", decoding).tokens == expected.tokens
