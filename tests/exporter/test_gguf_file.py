"""GGUF file: models that cannot be loaded exactly are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

from spaceport.exporter import gguf_file
from spaceport.exporter.checkpoint_files import is_gguf
from spaceport.exporter.gguf_file import GgufTensor, read_gguf
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.contract.faults import MissingDependency
from support.gguf_files import random_model, write_gguf


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", random_model())


def test_metadata_and_tensor_types_are_read(plain: Path) -> None:
    file = read_gguf(plain)
    assert file.architecture == "llama"
    assert file.get("bos_token_id") == 0
    assert file.get("token_ids") is None
    assert file.metadata["llama.context_length"] == 256
    assert file.tensors["blk.1.ffn_down.weight"] == GgufTensor("F32", (256, 64))
    assert len(file.tensors) == 2 + 2 * 9


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"general.architecture": "mamba"},
        "architecture 'mamba' is not supported in GGUF files: expected one of llama, qwen2",
    ),
    ({"general.type": "adapter"}, "general.type is 'adapter': expected a model"),
    ({"split.count": 3}, "one of 3 parts: expected a single file; merge them"),
    ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn', which cannot be loaded"),
    ({"llama.expert_count": 8}, "llama.expert_count is 8, which cannot be loaded"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[next(iter(changes)) for changes, _ in REFUSED])
def test_unsupported_metadata_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = random_model()
    if "general.architecture" in changes:
        model.config.model_type, changes = changes["general.architecture"], {}
    with pytest.raises(CheckpointError, match=message):
        read_gguf(write_gguf(tmp_path / "model.gguf", model, changes=changes))


def test_no_rope_scaling_is_accepted(tmp_path: Path) -> None:
    read_gguf(write_gguf(tmp_path / "model.gguf", random_model(), changes={"llama.rope.scaling.type": "none"}))


def test_an_unsupported_tensor_type_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model(), {"blk.0.ffn_down.weight": "TQ1_0"})
    with pytest.raises(
        CheckpointError, match=r"tensor blk.0.ffn_down.weight has type TQ1_0, which is not supported: expected"
    ):
        read_gguf(file)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model"])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not a complete GGUF file"):
        read_gguf(tmp_path / "model.gguf")


def test_a_truncated_file_is_refused(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(plain.read_bytes()[:-4000])
    with pytest.raises(CheckpointError, match=r"not a complete GGUF file"):
        read_gguf(tmp_path / "model.gguf")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model.gguf: no such file: expected a GGUF file"):
        read_gguf(tmp_path / "model.gguf")


def test_only_files_with_the_suffix_are_gguf_files(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    assert is_gguf(plain)
    assert not is_gguf(tmp_path / "folder.gguf")
    assert not is_gguf(tmp_path)


def test_a_missing_package_is_named_with_its_extra(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(MissingDependency, match=r"needs the package gguf, .*: pip install .*\[gguf\]'"):
        read_gguf(plain)
