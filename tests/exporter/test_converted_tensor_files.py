"""Tensor files: safetensors files and pickles of tensors, opened without running code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from spaceport.exporter.converted_tensor_files import open_tensors
from spaceport.exporter.sar_config import CheckpointError
from support.published_checkpoints import Format, write_weights

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.arange(4.0), "c.weight": torch.ones(1, 1)}


class Harmful:
    """An object whose pickle runs code when it is opened."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('code of a pickle ran')",))


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_all_tensors_are_read(format: Format, shards: int, tmp_path: Path) -> None:
    write_weights(tmp_path, WEIGHTS, format, shards)
    with open_tensors(tmp_path) as opened:
        assert opened.shapes == {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}
        assert all(torch.equal(opened.read(name), tensor) for name, tensor in WEIGHTS.items())


def test_the_old_format_of_pickles_is_read(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with open_tensors(tmp_path) as opened:
        assert torch.equal(opened.read("a.weight"), WEIGHTS["a.weight"])


def test_safetensors_files_come_first_and_other_pickles_are_not_opened(tmp_path: Path) -> None:
    write_weights(tmp_path, WEIGHTS, "safetensors")
    torch.save(Harmful(), tmp_path / "pytorch_model.bin")
    torch.save(Harmful(), tmp_path / "training_args.bin")
    with open_tensors(tmp_path) as opened:
        assert set(opened.shapes) == set(WEIGHTS)


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message), open_tensors(folder):
        pass


@pytest.mark.parametrize("content", [Harmful(), {"a.weight": Harmful()}], ids=["object", "entry"])
def test_code_in_a_pickle_is_not_run(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    refused(tmp_path, r"pytorch_model\.bin: cannot be read as a file of tensors: .*: expected tensors only")


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, {1: torch.ones(1)}], ids=["list", "number", "name"])
def test_a_pickle_of_other_things_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    refused(tmp_path, r": expected tensors by name; copy")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"])
def test_a_damaged_file_is_refused(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    refused(tmp_path, re.escape(name) + r": cannot be read.* or download it again")


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_a_missing_shard_is_refused_by_name(format: Format, tmp_path: Path) -> None:
    write_weights(tmp_path, WEIGHTS, format, 3)
    (missing,) = tmp_path.glob("*-00002-of-00003*")
    missing.unlink()
    refused(tmp_path, f"the weight file {missing.name} is missing: expected 3 files, as .*index.json says")


def test_an_invalid_index_and_a_tensor_in_two_files_are_refused(tmp_path: Path) -> None:
    for name in ("pytorch_model-1.bin", "pytorch_model-2.bin"):
        torch.save({"a.weight": WEIGHTS["a.weight"]}, tmp_path / name)
    refused(tmp_path, r"tensor a\.weight is in two files: expected it in one")
    write_weights(tmp_path, WEIGHTS, "safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": 1}}))
    refused(tmp_path, r"weight_map is invalid: expected the file of each tensor")
