"""Converted Nemotron: the causal pass has the published logits, and what differs from the published models is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spaceport.exporter.checkpoint import TokenFlags, load_model, open_checkpoint
from spaceport.exporter.quiet import quiet_libraries
from spaceport.exporter.sar_config import CheckpointError
from support.published_nemotron import nemotron_logits, random_weights, write_nemotron

TEXT = [5, 9, 200, 33, 17, 5, 80, 401, 64, 12, 7, 300, 21, 90, 55, 18, 77, 260, 31, 6]


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    quiet_libraries()


def test_the_causal_pass_has_the_published_logits(tmp_path: Path) -> None:
    """The text is longer than original_max_position_embeddings, so that queries are scaled."""
    weights, adapter = random_weights()
    opened = open_checkpoint(write_nemotron(tmp_path / "model", weights, None), TokenFlags())
    assert (opened.config.model_type, opened.tokens.mask, opened.tokens.end) == ("ministral3", (), (1, 3))
    with torch.no_grad():
        output: Any = load_model(opened, "float32")(torch.tensor([TEXT]))
    causal = torch.ones(len(TEXT), len(TEXT), dtype=torch.bool).tril()
    assert (output.logits[0] - nemotron_logits(weights, adapter, TEXT, causal)).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"dlm_paradigm": "block_diff"}, r"dlm_paradigm is 'block_diff', so the model has another attention"),
        ({"attention_bias": True}, r"attention_bias is True, so the model has biases"),
        ({"sliding_window": 8}, r"sliding_window is 8, so the model has sliding windows"),
        ({"vision_config": {}}, r"unknown field 'vision_config'"),
        ({"max_position_embeddings": 128}, r"factor is 16, max_position_embeddings is 128: expected 16"),
        (
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters is .*: expected an object with rope_type yarn",
        ),
    ],
)
def test_what_differs_from_the_published_models_is_refused(
    entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_nemotron(tmp_path / "model", *random_weights(), **entries), TokenFlags())


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    weights, adapter = random_weights()
    del weights["encoder.norm.weight"]
    with pytest.raises(CheckpointError, match=r"tensor encoder.norm.weight is missing: expected the 21 tensors"):
        open_checkpoint(write_nemotron(tmp_path / "lacks", weights, adapter), TokenFlags())


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    checkpoint = write_nemotron(tmp_path / "model", *random_weights())
    (checkpoint / "tokenizer.json").write_text("{", "utf-8")
    with pytest.raises(CheckpointError, match=r"its tokenizer cannot be read: .*: expected tokenizer.json"):
        open_checkpoint(checkpoint, TokenFlags())
