"""A dry run gives published numbers for published configurations, and refuses what an export would refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.dry_run import dry_run
from spaceport.exporter.export import ExportOptions
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.traits import UnsupportedModel
from support.paths import TINY
from support.published_checkpoints import CONFIGS
from support.published_sizes import CONVERTED, SIZES

INDEX = "model.safetensors.index.json"


def folder_of(content: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content), "utf-8")
    return folder


@pytest.mark.parametrize("name", SIZES)
def test_a_published_configuration_has_the_published_number_of_parameters(name: str, tmp_path: Path) -> None:
    content, parameters, (layers, heads, head_dim) = SIZES[name]
    found = dry_run(folder_of(content, tmp_path), ExportOptions(dtype="float16"))
    assert found.parameters == parameters
    assert found.signature.kv_bytes(1, 1) == 2 * layers * heads * head_dim * 2
    rotary = 4 * head_dim // 2  # at most; inline in model.onnx if small
    assert 0 <= found.files["model.onnx.data"] - 2 * parameters <= rotary


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_configuration_needs_no_files_but_itself(name: str, tmp_path: Path) -> None:
    family, sizes, parameters = CONVERTED[name]
    found = dry_run(folder_of({**CONFIGS[family], **sizes}, tmp_path), ExportOptions(dtype="bfloat16"))
    assert found.parameters == parameters


def copied(folder: Path, **changes: Any) -> Path:
    """The tiny checkpoint's configuration with changes, and its weights."""
    content = json.loads((TINY / "config.json").read_text("utf-8"))
    folder_of({**content, **changes}, folder)
    (folder / "model.safetensors").symlink_to(TINY / "model.safetensors")
    return folder


def test_the_headers_of_weight_files_are_compared_with_the_configuration(tmp_path: Path) -> None:
    assert dry_run(TINY, ExportOptions()).checked_headers
    assert not dry_run(
        folder_of(json.loads((TINY / "config.json").read_text()), tmp_path / "a"), ExportOptions()
    ).checked_headers
    size = json.loads((TINY / "config.json").read_text())["intermediate_size"]
    with pytest.raises(CheckpointError, match=r"has shape .*config.json describes .*copy the config.json"):
        dry_run(copied(tmp_path / "b", intermediate_size=2 * size), ExportOptions())


def test_a_missing_output_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no lm_head.weight, and tie_word_embeddings is false: expected"):
        dry_run(copied(tmp_path / "a", tie_word_embeddings=False), ExportOptions())


def test_an_incomplete_download_is_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path / "a")
    names = {"weight_map": {"x": "model.safetensors", "y": "model-2.safetensors"}}
    (folder / INDEX).write_text(json.dumps(names), "utf-8")
    with pytest.raises(
        CheckpointError, match=r"1 of 2 weight files are missing, such as model-2.safetensors: expected"
    ):
        dry_run(folder, ExportOptions())


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ({"model_type": "nobody"}, CheckpointError, "architecture 'nobody' is not one .*expected one such as llama"),
        ({"model_type": "t5"}, CheckpointError, "'t5' is not a decoder-only causal language model: expected"),
        (
            {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 4},
            UnsupportedModel,
            "takes no position_ids: .*expected rotary",
        ),
    ],
    ids=["unknown family", "encoder-decoder", "ALiBi"],
)
def test_a_family_that_an_export_refuses_is_refused(
    content: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        dry_run(folder_of(content, tmp_path), ExportOptions())


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config.json in it: copy that of the checkpoint"):
        dry_run(tmp_path, ExportOptions())
    with pytest.raises(CheckpointError, match=r"no such folder: expected a folder with config.json, or a GGUF file"):
        dry_run(tmp_path / "none", ExportOptions())


def test_an_adapter_beside_the_model_is_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path / "a")
    (folder / "mask_adapter.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"does not count: expected the base model; run it on that folder"):
        dry_run(folder, ExportOptions())
