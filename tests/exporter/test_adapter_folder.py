"""Adapter folders: with its base model, one gives the bundle of the tuned checkpoint; any other model is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from torch import Tensor
from transformers import AutoTokenizer

from spaceport.exporter.checkpoint import (
    Checkpoint,
    TokenFlags,
    load_model,
    load_tokenizer,
    open_checkpoint,
    quiet_libraries,
)
from spaceport.exporter.checkpoint_files import BASE_FILE, SAR_FILE, save_acceptance
from spaceport.exporter.draft_files import EMBEDDINGS_FILE, read_adapter_folder
from spaceport.exporter.export import ExportOptions, export
from spaceport.graphs.contract.draft_methods import DraftAcceptance
from spaceport.graphs.contract.faults import CheckpointError
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.manifest import MANIFEST_FILE
from spaceport.graphs.contract.signature import Precision
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import run
from support.adapters import train
from support.copied_checkpoint import copy_of_tiny
from support.gguf_files import random_model, write_gguf
from support.published import write_checkpoint
from support.small_bundle import new_bundle

ADAPTER_FILE = "mask_adapter.safetensors"

VOCAB, GROWN = 628, 640
MASK = VOCAB
IDS = torch.arange(40)[None] * 7 % VOCAB
HALF = "model.layers.0.mlp.up_proj.A"


def opened(base: Path, adapter: Path | None = None) -> Checkpoint:
    return open_checkpoint(base, TokenFlags(), adapter=adapter)


def state_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {**load_model(checkpoint, "float32").state_dict()}


def logits(checkpoint: Checkpoint, ids: Tensor = IDS, dtype: Precision = "float32") -> Tensor:
    with torch.no_grad():
        found: Tensor = load_model(checkpoint, dtype)(ids).logits
    return found


def edit_tensors(file: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    found = load_file(file)
    change(found)
    save_file(found, file)


def edit_json(file: Path, **entries: Any) -> None:
    """Set entries of a JSON file; `a__b` is an entry of an object in it."""
    content = json.loads(file.read_text("utf-8"))
    for name, value in entries.items():
        *owners, last = name.split("__")
        reduce(dict.__getitem__, owners, content)[last] = value
    file.write_text(json.dumps(content), "utf-8")


def randomize(found: dict[str, Tensor]) -> None:
    random = torch.Generator().manual_seed(0)
    found.update({name: torch.randn(found[name].shape, generator=random).half() * 0.05 for name in sorted(found)})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet_libraries()
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "base", random_model())


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    """A trained adapter folder, with larger values so that mask rows differ much."""
    folder = train(base, base.with_name("adapter"), adapter_only=True)
    edit_tensors(folder / ADAPTER_FILE, randomize)
    return folder


@pytest.fixture(scope="module")
def tuned(base: Path, adapter: Path) -> Path:
    """The same training as a whole checkpoint, with the values of the adapter folder."""
    folder = train(base, base.with_name("tuned"), adapter_only=False)
    found = load_file(adapter / ADAPTER_FILE)
    save_file({name: tensor.float() for name, tensor in found.items()}, folder / ADAPTER_FILE)
    return folder


def test_an_adapter_folder_has_no_base_weights(adapter: Path) -> None:
    files = {ADAPTER_FILE, BASE_FILE, EMBEDDINGS_FILE, SAR_FILE, "README.md", "metrics.jsonl"}
    assert {file.name for file in adapter.iterdir()} == files
    stored = load_file(adapter / EMBEDDINGS_FILE)
    assert stored["ids"].tolist() == list(range(VOCAB, GROWN))  # the mask token and padding
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {"ids": (12,), "input": (12, 64)}
    assert all(tensor.dtype == torch.float16 for tensor in load_file(adapter / ADAPTER_FILE).values())
    card = (adapter / "README.md").read_text("utf-8")
    assert card.startswith("# Adapter for base, trained with spaceport\n")
    assert "`spaceport export base BUNDLE --adapter adapter`" in card


def test_a_checkpoint_with_an_adapter_folder_is_the_tuned_checkpoint(base: Path, adapter: Path, tuned: Path) -> None:
    one, other = opened(base, adapter), opened(tuned)
    for name in ("tokens", "drafts", "tokenizer", "template", "special_tokens", "mechanisms"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.tokens.mask == (MASK,)
    assert load_tokenizer(one)("a[D]b")["input_ids"] == load_tokenizer(other)("a[D]b")["input_ids"]
    first, second = state_of(one), state_of(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    with pytest.raises(CheckpointError, match="tuned: has mask_adapter already: expected its base model, to add"):
        opened(tuned, adapter)


def test_acceptance_rates_are_those_of_the_adapter_folder(base: Path, adapter: Path, tmp_path: Path) -> None:
    base, adapter = shutil.copytree(base, tmp_path / "base"), shutil.copytree(adapter, tmp_path / "adapter")
    save_acceptance(base, of_base := DraftAcceptance((0.25,)))
    assert opened(base, adapter).drafts.acceptance == ()
    save_acceptance(adapter, of_adapter := DraftAcceptance((0.75, 0.5)))
    assert (opened(base, adapter).drafts.acceptance, opened(base).drafts.acceptance) == ((of_adapter,), (of_base,))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_adapter_changes_mask_rows_only(base: Path, adapter: Path, dtype: Precision) -> None:
    ids = IDS.clone()
    ids[:, 30:] = MASK
    plain, gated = logits(opened(base), dtype=dtype), logits(opened(base, adapter), ids, dtype)
    assert gated.shape[-1] == GROWN
    assert torch.equal(plain[:, :30], gated[:, :30, :VOCAB])
    assert (plain[:, 30:] - gated[:, 30:, :VOCAB]).abs().amax(-1).min() > 0.1


def test_the_base_may_be_a_gguf_file_or_have_output_embeddings(base: Path, adapter: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model())
    assert torch.equal(logits(opened(file, adapter)), logits(opened(base, adapter)))
    untied = write_checkpoint(tmp_path / "base", random_model(tied=False))
    folder, tuned = train(untied, tmp_path / "adapter"), train(untied, tmp_path / "tuned", adapter_only=False)
    tables = load_file(folder / EMBEDDINGS_FILE)
    assert {name: len(tensor) for name, tensor in tables.items()} == {"ids": 12, "input": 12, "output": 12}
    found = state_of(opened(untied, folder))
    for name, tensor in state_of(opened(tuned)).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-6)  # adapters are in float16


def test_fork_and_child_tokens_of_the_base_model_are_recorded(tmp_path: Path) -> None:
    base = copy_of_tiny(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([AddedToken(name, special=True) for name in ("[Fork]", "[Child]")])
    tokenizer.save_pretrained(base)
    edit_json(base / SAR_FILE, fork_token="[Fork]", child_token="[Child]", mask_tokens=[], mask_slots=None)
    folder = train(base, tmp_path / "adapter", adapter_only=True)
    one, own = opened(base, folder), opened(base)
    assert (one.tokens.fork, one.tokens.child) == (own.tokens.fork, own.tokens.child) == (VOCAB, VOCAB + 1)
    assert set(read_adapter_folder(folder).tokens) == {"[D]", "[Fork]", "[Child]"}
    assert torch.equal(logits(one)[..., :VOCAB], logits(own)[..., :VOCAB])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["float32", "int8"])
def test_the_bundle_is_that_of_the_tuned_checkpoint(
    base: Path, adapter: Path, tuned: Path, tmp_path: Path, name: str
) -> None:
    one, other, without = tmp_path / "tuned", tmp_path / "adapted", tmp_path / "plain"
    export(tuned, one, ExportOptions(FORMATS[name]))
    export(base, other, ExportOptions(FORMATS[name], adapter=adapter))
    export(base, without, ExportOptions(FORMATS[name]))
    assert {file.name for file in one.iterdir()} == {file.name for file in other.iterdir()}
    for file in one.iterdir():
        if file.name != MANIFEST_FILE:  # which says where the checkpoint came from
            assert file.read_bytes() == (other / file.name).read_bytes(), file.name
    manifests = [replace(open_bundle(folder).manifest, provenance={}) for folder in (one, other)]
    assert manifests[0] == manifests[1]
    with Runtime.open(without) as plain, Runtime.open(other, step_costs="free") as drafting:
        for prompt in ("import json", "def main("):
            expected = plain.generate(prompt, Decoding(max_tokens=12))
            assert drafting.generate(prompt, Decoding(max_tokens=12, mask_slots=3)).tokens == expected.tokens
    checked = ["check", str(other), str(base), "--long-context", "40", "--threads", "1"]
    assert run([*checked, "--adapter", str(adapter)]) == 0
    assert run(checked) == 3


def test_options_that_do_not_fit_an_adapter_are_refused(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, bundle = tmp_path / "data.jsonl", str(new_bundle(tmp_path / "bundle"))
    data.write_text('{"text": "import json"}\n', "utf-8")
    added, only = ["--adapter", str(adapter)], ["--adapter-only", "--method"]
    for command, code, message in (
        (["export", str(base), str(tmp_path / "b"), "--mask-token", "5", *added], 2, "--mask-token has no effect with"),
        (["check", bundle, *added], 2, "--adapter has no effect without CHECKPOINT"),
        (["acceptance", bundle, str(data), *added], 2, "expected a checkpoint with it"),
        (["tune", str(base), str(tmp_path / "t"), str(data), *only, "full"], 2, "--adapter-only has no effect with"),
        (["tune", str(base), str(adapter), str(data), *only, "gated-lora"], 3, "adapter: a trained adapter exists"),
    ):
        assert run(command) == code
        assert message in capsys.readouterr().err


def remove_a_row(found: dict[str, Tensor]) -> None:
    found["ids"] = found["ids"][1:].clone()


def narrow_rows(found: dict[str, Tensor]) -> None:
    found["input"] = found["input"][:, 1:].clone()


Spoil = Callable[[Path], object]
# What is done to the file of an adapter folder, and a pattern of the message.
SPOILS: list[tuple[str, Spoil, str]] = [
    (BASE_FILE, Path.unlink, r"no base\.json in it: expected an adapter folder, as"),
    (BASE_FILE, partial(edit_json, schema=2), r"base\.json: schema is 2: expected 1; copy"),
    (BASE_FILE, partial(edit_json, tokens=[]), r"base\.json: tokens is list: expected an object"),
    (BASE_FILE, partial(edit_json, tokens={"[D]": 629}), r"'\[D\]' gets the id 628, the adapter in .* trained with"),
    (BASE_FILE, partial(edit_json, base__sizes__num_hidden_layers=3), "its num_hidden_layers is 2, the adapter was tr"),
    (BASE_FILE, partial(edit_json, base__weights__float32="0" * 64), "in float32 have the digest [0-9a-f]{12}, the ad"),
    (SAR_FILE, partial(edit_json, mechanisms={}), "has none of mask_adapter, draft_heads: expected"),
    (SAR_FILE, partial(edit_json, fork_token="[F]", child_token="[C]"), r"names the token '\[C\]': expected one of"),
    (ADAPTER_FILE, partial(edit_tensors, change=lambda found: found.pop(HALF)), rf"no tensor {HALF}: expected 28"),
    (EMBEDDINGS_FILE, Path.unlink, r"token_embeddings\.safetensors: cannot be read: "),
    (EMBEDDINGS_FILE, partial(edit_tensors, change=remove_a_row), "has rows of 11 tokens: expected the 12 tokens that"),
    (EMBEDDINGS_FILE, partial(edit_tensors, change=narrow_rows), r"\{'input': \(12, 63\)\}: expected \{'input': \("),
]


@pytest.mark.parametrize(("file", "spoil", "message"), SPOILS)
def test_an_incomplete_or_wrong_adapter_folder_is_refused(
    base: Path, adapter: Path, tmp_path: Path, file: str, spoil: Spoil, message: str
) -> None:
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    spoil(folder / file)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(opened(base, folder), "float32")
    assert str(tmp_path) in str(caught.value) or str(base) in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_another_model_of_the_same_sizes_is_refused_as_base(adapter: Path, tmp_path: Path, dtype: Precision) -> None:
    model = random_model()
    model.model.layers[1].mlp.down_proj.weight.data.mul_(1.01)
    other = write_checkpoint(tmp_path / "other", model)
    with pytest.raises(CheckpointError, match=rf"other: its weights in {dtype} have the digest \w+, the adapter was"):
        load_model(opened(other, adapter), dtype)
