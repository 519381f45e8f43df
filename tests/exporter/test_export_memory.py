"""The estimated memory of an export depends on one layer if weights are read layer by layer, otherwise on the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.draft_additions import DraftAdditions
from spaceport.exporter.dry_run import DryRun, dry_run
from spaceport.exporter.export import ExportOptions
from spaceport.exporter.heads_file import HeadsConfig
from support.families import FAMILIES, build
from support.paths import TINY
from support.published import write_checkpoint
from support.published_checkpoints import CONFIGS
from support.published_sizes import SIZES

LAYER = 4 * 2048 * 2048 + 3 * 2048 * 8192 + 2 * 2048  # parameters of a layer of `found`


def found(folder: Path, options: ExportOptions | None = None, **changes: Any) -> DryRun:
    content = json.loads((TINY / "config.json").read_text("utf-8"))
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**content, **sizes, "head_dim": 128, **changes}), "utf-8")
    return dry_run(folder, options or ExportOptions())


def test_further_layers_need_the_memory_of_their_traced_graph_only(tmp_path: Path) -> None:
    few, many = (found(tmp_path, num_hidden_layers=layers) for layers in (2, 22))
    assert few.memory.streamed
    assert few.memory.weights == many.memory.weights
    assert LAYER * 4 <= few.memory.weights <= 1.5 * LAYER * 4
    assert 0 < many.memory.total - few.memory.total < LAYER * 4


def test_a_large_embedding_counts_as_a_layer(tmp_path: Path) -> None:
    small, large = (found(tmp_path, vocab_size=vocab, tie_word_embeddings=False) for vocab in (1000, 100_000))
    assert large.memory.weights / small.memory.weights == pytest.approx(100_000 * 2048 / LAYER)


def test_half_precision_needs_half_the_memory_for_weights(tmp_path: Path) -> None:
    whole, half = (found(tmp_path, ExportOptions(dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert half.memory.weights == pytest.approx(whole.memory.weights / 2, rel=1e-6)


def test_heads_and_both_embeddings_are_in_memory(tmp_path: Path) -> None:
    plain = found(tmp_path, tie_word_embeddings=False)
    vocab = plain.signature.vocab_size
    heads = DraftAdditions((), vocab, None, HeadsConfig(3, 1))
    both = dry_run(tmp_path, ExportOptions(), heads)
    added = both.parameters - plain.parameters
    assert added > 3 * 2048 * vocab
    assert both.memory.weights - plain.memory.weights == 4 * (added + 2 * 2048 * vocab)


def test_a_checkpoint_that_cannot_be_streamed_needs_memory_for_the_model(tmp_path: Path) -> None:
    config = CONFIGS["qwen"]
    (tmp_path / "converted").mkdir()
    (tmp_path / "converted" / "config.json").write_text(json.dumps(config), "utf-8")
    name, (content, parameters, _) = next(iter(SIZES.items()))
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(content), "utf-8")
    converted = dry_run(tmp_path / "converted", ExportOptions())
    remote = dry_run(tmp_path / name, ExportOptions(remote_code=True))
    assert [each.memory.streamed for each in (converted, remote)] == [False, False]
    assert remote.memory.weights == 2 * 4 * parameters
    assert (remote.temporary, converted.temporary) == (0, 0)


@pytest.mark.parametrize(("name", "streamed"), [("llama", True), ("mixtral", False)])
def test_the_headers_of_the_files_say_whether_matrices_are_merged(name: str, streamed: bool, tmp_path: Path) -> None:
    (family,) = (one for one in FAMILIES if one.name == name)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", build(replace(family)))
    assert dry_run(checkpoint, ExportOptions()).memory.streamed is streamed
    (checkpoint / "model.safetensors").unlink()
    assert dry_run(checkpoint, ExportOptions()).memory.streamed  # not known yet
