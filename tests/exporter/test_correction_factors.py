"""Correction factors: damaged files and those of another model are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from spaceport.exporter.correction_factors import (
    FACTORS_FILE,
    check_factors,
    read_factors,
    write_correction,
    write_factors,
)
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.contract.draft_correction import CORRECTION_FILE, read_tables
from spaceport.graphs.correction import Factors

FACTORS = Factors(torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.ones(6, 2))


def test_factors_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_factors(tmp_path) is None
    write_factors(tmp_path, FACTORS)
    found = read_factors(tmp_path)
    assert found is not None
    assert found.rank == 2
    for factor, expected in zip(found, FACTORS, strict=True):
        torch.testing.assert_close(factor, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [9, 10, 12])
def test_tables_have_a_line_for_each_token_of_the_vocabulary(tmp_path: Path, vocab_size: int) -> None:
    embeddings = nn.Embedding(10, 6)
    write_correction(tmp_path, FACTORS, embeddings, vocab_size)
    with (tmp_path / CORRECTION_FILE).open("rb") as file:
        tables = read_tables(file, vocab_size)
    expected = FACTORS.tables(embeddings.weight)
    for table, other in zip(tables, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(table[:10]).float(), other[:vocab_size], rtol=2e-3, atol=1e-3)
        assert not table[10:].any()


def test_a_correction_of_another_model_is_refused(tmp_path: Path) -> None:
    check_factors(tmp_path, FACTORS, nn.Embedding(10, 6))
    with pytest.raises(CheckpointError, match=f"{FACTORS_FILE}: is for embeddings of size 6: expected 7, that of the"):
        check_factors(tmp_path, FACTORS, nn.Embedding(10, 7))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"before": torch.zeros(4, 2)}, "has tensors with the shapes"),
        ({"before": torch.zeros(4, 2), "after": torch.zeros(4, 3)}, "expected before and after, H x rank"),
        ({"before": torch.zeros(4, 2), "after": torch.full((4, 2), torch.inf)}, "numbers that are not finite"),
        (None, "cannot be read"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: dict[str, torch.Tensor] | None, message: str) -> None:
    if content is None:
        (tmp_path / FACTORS_FILE).write_bytes(b"nothing")
    else:
        save_file(content, tmp_path / FACTORS_FILE)
    with pytest.raises(CheckpointError, match=message):
        read_factors(tmp_path)
