"""Training of forks with gated adapters: drafts stay as they are, [Fork] has an input row of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spaceport.exporter.adapter_folder import EMBEDDINGS_FILE
from spaceport.exporter.checkpoint import TokenFlags, load_model, open_checkpoint
from spaceport.exporter.correction_factors import FACTORS_FILE
from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.input_rows_file import read_input_rows, write_input_rows
from spaceport.graphs.input_rows import InputRows
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.tune.job import TuningJob
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.tuning import tune
from support.gated_training import SETTINGS, trained, write_lists
from support.paths import TINY

pytestmark = pytest.mark.slow


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_lists(tmp_path / "data.jsonl")


def test_forks_are_trained_beside_a_gated_adapter(data: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, objective="both", learning_rate=0.05, max_steps=12, unfork_rate=0.0)
    tune(TuningJob(TINY, tmp_path / "adapter", (data,), settings, adapter_only=True))
    stored = load_file(tmp_path / "adapter" / EMBEDDINGS_FILE)
    tiny = load_model(open_checkpoint(TINY, TokenFlags()), "float32").get_input_embeddings().weight  # type: ignore[operator]
    assert all((row != tiny[token]).any() for token, row in zip(stored["ids"], stored["input"], strict=True))
    export(TINY, tmp_path / "plain.bundle", ExportOptions())
    # the tiny checkpoint names these tokens already, so its own bundle forks by default
    assert open_bundle(tmp_path / "plain.bundle").manifest.fork_by_default
    export(TINY, tmp_path / "bundle", ExportOptions(adapter=tmp_path / "adapter"))
    assert not open_bundle(tmp_path / "bundle").manifest.fork_by_default
    prompt = "User: Which 1?\n"
    with Runtime.open(tmp_path / "plain.bundle", max_seq_len=200) as runtime:
        expected = runtime.generate(prompt, Decoding(max_tokens=40, fork=False))
    with Runtime.open(tmp_path / "bundle", max_seq_len=200) as runtime:
        assert runtime.generate(prompt, Decoding(max_tokens=40)).tokens == expected.tokens


@pytest.mark.nightly
def test_an_adapter_learns_to_fork_without_changing_its_drafts(data: Path, tmp_path: Path) -> None:
    first = trained(data, tmp_path / "first", replace(SETTINGS, correction_rank=2, learning_rate=0.01))
    forks = TrainingSettings(
        "apar", "gated-lora", batch_size=2, max_steps=9, epochs=9, cutoff=160, learning_rate=0.05, unfork_rate=0.0
    )
    further = trained(data, tmp_path / "further", forks, adapter=tmp_path / "first")
    assert all(torch.equal(tensor, further[name]) for name, tensor in first.items())
    one, two = (load_file(tmp_path / name / FACTORS_FILE) for name in ("first", "further"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    config = json.loads((tmp_path / "further" / "sar_config.json").read_text())
    assert (config["mask_slots"], config["fork_by_default"]) == (3, False)
    before, after = (load_file(tmp_path / name / EMBEDDINGS_FILE) for name in ("first", "further"))
    rows = {int(token): row for token, row in zip(after["ids"], after["input"], strict=True)}
    for token, row in zip(before["ids"], before["input"], strict=True):
        torch.testing.assert_close(rows[int(token)], row)
    manifest = export(TINY, tmp_path / "bundle", ExportOptions(adapter=tmp_path / "further"))
    assert manifest.max_mask_slots == 3
    assert manifest.tokens.fork is not None


def test_a_fork_token_has_an_input_row_apart_from_its_output_row(data: Path, tmp_path: Path) -> None:
    first = trained(data, tmp_path / "first")
    forks = replace(SETTINGS, objective="apar", max_steps=3, learning_rate=0.05, unfork_rate=0.0)
    trained(data, tmp_path / "forks", forks, adapter=tmp_path / "first")
    found = read_input_rows(tmp_path / "forks")
    assert found is not None
    checkpoint = open_checkpoint(TINY, TokenFlags(), adapter=tmp_path / "forks")
    assert found.tokens == checkpoint.tokens.fork_ids
    model = load_model(checkpoint, "float32")
    embedding = model.get_input_embeddings()
    fork = torch.tensor(found.tokens)
    assert torch.equal(embedding(fork), found.rows)
    assert not torch.allclose(embedding.weight[fork], found.rows)  # each was trained for its own purpose
    # drafts that are trained further leave the forks as they are
    again = trained(data, tmp_path / "again", replace(SETTINGS, max_steps=2), adapter=tmp_path / "forks")
    assert any(not torch.equal(tensor, first[name]) for name, tensor in again.items())
    kept = read_input_rows(tmp_path / "again")
    assert kept is not None
    assert torch.equal(kept.rows, found.rows)
    # and so do forks that are trained further, up to their own steps
    still = replace(forks, max_steps=1, learning_rate=1e-12)
    trained(data, tmp_path / "still", still, adapter=tmp_path / "forks")
    same = read_input_rows(tmp_path / "still")
    assert same is not None
    torch.testing.assert_close(same.rows, found.rows)


def test_a_bundle_reads_a_fork_token_from_its_input_row(data: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, objective="both", learning_rate=0.05, unfork_rate=0.0)
    tune(TuningJob(TINY, tmp_path / "tuned", (data,), settings))
    found = read_input_rows(tmp_path / "tuned")
    assert found is not None
    export(tmp_path / "tuned", tmp_path / "own", ExportOptions())
    write_input_rows(tmp_path / "tuned", InputRows(found.tokens, -found.rows))
    export(tmp_path / "tuned", tmp_path / "other", ExportOptions())
    scores = {}
    for name in ("own", "other"):
        with Runtime.open(tmp_path / name, max_seq_len=100) as runtime:
            scores[name] = runtime.score([5, *found.tokens, 7, 8])
    assert scores["own"].logprobs[0] == scores["other"].logprobs[0]
    assert scores["own"].logprobs[1] != scores["other"].logprobs[1]
