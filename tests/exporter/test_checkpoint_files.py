"""Checkpoint files: what would hang or fill the memory is refused before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.checkpoint_files import load_with_own_attention, refuse_sizes
from spaceport.exporter.sar_config import CheckpointError, read_json
from support.paths import TINY


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "checkpoint"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "sar_config.json", "unknown"])
def test_a_fifo_is_refused_and_not_waited_for(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint / name)
    with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
        open_checkpoint(checkpoint, TokenFlags())


def test_a_link_to_a_device_is_refused(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    (checkpoint / "generation_config.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(checkpoint, TokenFlags())
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_json(checkpoint / "generation_config.json")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000: expected at most 4096"),
        ({"n_layer": 5000}, "n_layer is 5000: expected at most 4096"),
        ({"num_attention_heads": 10**9}, "num_attention_heads is 1000000000: expected at most 65536"),
        ({"num_local_experts": 10**9}, "num_local_experts is"),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776: expected at most 2147483647"),
        ({"vocab_size": -(2**40)}, "vocab_size is -1099511627776"),
        ({"max_position_embeddings": 10**50}, "max_position_embeddings is a number of 51 digits"),
        ({"text_config": {"layers": [{"d_model": 2**40}]}}, "d_model is"),
    ],
)
def test_an_absurd_size_is_refused_before_memory_is_allocated(
    checkpoint: Path, entries: dict[str, Any], message: str
) -> None:
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | entries))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(checkpoint, TokenFlags())


def test_usual_sizes_are_accepted() -> None:
    sizes = {"hidden_size": 16384, "num_hidden_layers": 126, "vocab_size": 262144, "max_position_embeddings": 10485760}
    refuse_sizes(Path("config.json"), {**sizes, "num_parameters": 10**12, "quantization": [{"bits": 4, "tie": True}]})


def test_a_number_of_too_many_digits_is_not_valid_json(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"vocab_size": ' + "1" * 5000 + "}")
    with pytest.raises(CheckpointError, match=r"not valid JSON: .*4300"):
        open_checkpoint(checkpoint, TokenFlags())


def test_the_attention_implementation_is_always_passed() -> None:
    """A configuration can name an implementation that would be fetched."""
    asked: list[str] = []

    def load(folder: str, *, attn_implementation: str) -> tuple[str, dict[str, Any]]:
        asked.append(attn_implementation)
        if folder == "old" and attn_implementation == "sdpa":
            raise ValueError("does not support torch.nn.functional.scaled_dot_product_attention yet")
        if folder == "broken":
            raise ValueError("another reason")
        return folder, {}

    assert load_with_own_attention(load, "new") == ("new", {})
    assert load_with_own_attention(load, "old") == ("old", {})
    with pytest.raises(ValueError, match="another reason"):
        load_with_own_attention(load, "broken")
    assert asked == ["sdpa", "sdpa", "eager", "sdpa"]
