"""Input rows file: written rows are read again; damaged files and those of another model are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from spaceport.exporter.input_rows_file import INPUT_ROWS_FILE, check_input_rows, read_input_rows, write_input_rows
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.input_rows import InputRows

GIVEN = InputRows((9, 7), torch.randn(2, 6, generator=torch.Generator().manual_seed(0)))


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_input_rows(tmp_path) is None
    write_input_rows(tmp_path, GIVEN)
    found = read_input_rows(tmp_path)
    assert found is not None
    assert found.tokens == (9, 7)
    assert torch.equal(found.rows, GIVEN.rows)


@pytest.mark.parametrize(("tokens", "hidden"), [(9, 6), (10, 7)])
def test_rows_of_another_model_are_refused(tmp_path: Path, tokens: int, hidden: int) -> None:
    check_input_rows(tmp_path, GIVEN, nn.Embedding(10, 6))
    expected = f"has rows of size 6 for the ids .9, 7.: expected size {hidden} and ids below {tokens}"
    with pytest.raises(CheckpointError, match=expected):
        check_input_rows(tmp_path, GIVEN, nn.Embedding(tokens, hidden))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ({"rows": torch.zeros(1, 6)}, "expected ids, N, and rows, N x H"),
        ({"ids": torch.tensor([1, 2]), "rows": torch.zeros(1, 6)}, "expected ids, N, and rows, N x H"),
        ({"ids": torch.tensor([1]), "rows": torch.zeros(1, 6, 1)}, "expected ids, N, and rows, N x H"),
        ({"ids": torch.tensor([1, 1]), "rows": torch.zeros(2, 6)}, "expected whole numbers, each once"),
        ({"ids": torch.tensor([1.0]), "rows": torch.zeros(1, 6)}, "expected whole numbers, each once"),
        ({"ids": torch.tensor([1]), "rows": torch.full((1, 6), torch.nan)}, "numbers that are not finite"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: dict[str, torch.Tensor] | None, message: str) -> None:
    if content is None:
        (tmp_path / INPUT_ROWS_FILE).write_bytes(b"nothing")
    else:
        save_file(content, tmp_path / INPUT_ROWS_FILE)
    with pytest.raises(CheckpointError, match=message):
        read_input_rows(tmp_path)
