"""GGUF hyperparameters: each is validated, and compared with the shapes of the tensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

from spaceport.exporter.gguf_file import read_gguf
from spaceport.exporter.gguf_hyperparameters import Hyperparameters, check_shapes, hyperparameters_of
from spaceport.exporter.sar_config import CheckpointError
from support.gguf_files import random_model, write_gguf


def opened(folder: Path, family: str = "llama", **changes: Any) -> Hyperparameters:
    """The hyperparameters of a tiny file, compared with its tensors."""
    named = {f"{family}.{key.replace('__', '.')}": value for key, value in changes.items()}
    file = read_gguf(write_gguf(folder / "model.gguf", random_model(family), changes=named))
    found = hyperparameters_of(file)
    check_shapes(file, found)
    return found


def test_the_sizes_of_a_model_are_read(tmp_path: Path) -> None:
    assert opened(tmp_path) == Hyperparameters(64, 2, 256, 4, 2, 16)
    assert opened(tmp_path, "qwen2") == Hyperparameters(64, 2, 256, 4, 2, 16)
    assert opened(tmp_path, "qwen3", attention__key_length=16) == Hyperparameters(64, 2, 256, 4, 2, 16)


def test_the_head_size_is_stated_or_the_hidden_size_per_head(tmp_path: Path) -> None:
    wide = {"attention__key_length": 32, "rope__dimension_count": 32}
    with pytest.raises(CheckpointError, match=r"tensor blk.0.attn_q.weight has shape \(64, 64\): expected \(64, 128\)"):
        opened(tmp_path, **wide)
    with pytest.raises(CheckpointError, match=r"rope.dimension_count is 16, the head size is 32: expected equal sizes"):
        opened(tmp_path, **{**wide, "rope__dimension_count": 16})


SIZES = ("embedding_length", "attention__head_count", "block_count", "feed_forward_length", "context_length")
WRONG = (
    (None, "is missing"),
    (0, "is 0"),
    ("8", "is '8'"),
    (True, "is True"),
    ([1, 2], "is an array"),
    (1.5, "is 1.5"),
)


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize(("value", "found"), WRONG, ids=[found for _, found in WRONG])
def test_a_size_that_is_missing_or_no_size_is_refused(key: str, value: Any, found: str, tmp_path: Path) -> None:
    message = f"model.gguf: llama.{key.replace('__', '.')} {found}: expected a whole number of at least 1; convert"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        opened(tmp_path, **{key: value})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kv heads": ({"attention__head_count_kv": 3}, "attention.head_count is 4: expected a multiple of 3 key and value"),
    "kv heads per layer": ({"attention__head_count_kv": [2, 2]}, "attention.head_count_kv is an array"),
    "heads": ({"attention__head_count": 6}, "embedding_length is 64: expected a multiple of 6 heads"),
    "odd heads": (
        {"attention__key_length": 15, "rope__dimension_count": 15},
        "the head size is 15: expected an even number",
    ),
    "inner size": (
        {"feed_forward_length": 128},
        "tensor blk.0.ffn_gate.weight has shape (64, 256): expected (64, 128)",
    ),
    "hidden size": ({"embedding_length": 128}, "llama.rope.dimension_count is 16, the head size is 32"),
    "layers": ({"block_count": 2**32 - 1}, "tensor blk.2.attn_q.weight is missing: expected the tensors of 4294967295"),
    "vocabulary": ({"vocab_size": 7}, "tensor token_embd.weight has shape (64, 628): expected (64, 7)"),
    "no epsilon": (
        {"attention__layer_norm_rms_epsilon": None},
        "layer_norm_rms_epsilon is missing: expected a floating",
    ),
    "zero epsilon": (
        {"attention__layer_norm_rms_epsilon": 0.0},
        "layer_norm_rms_epsilon is 0.0: expected a floating-point number above",
    ),
    "infinite base": (
        {"rope__freq_base": float("inf")},
        "llama.rope.freq_base is inf: expected a floating-point number above 0",
    ),
    "text as base": ({"rope__freq_base": "x"}, "llama.rope.freq_base is 'x': expected a floating-point number above 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hyperparameters_that_contradict_each_other_are_refused(name: str, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=re.escape(message)):
        opened(tmp_path, **changes)
