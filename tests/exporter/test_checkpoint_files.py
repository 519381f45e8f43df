"""Checkpoint files: what would block, exhaust the memory or is no model that generates is refused before anything is loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.checkpoint_files import load_with_own_attention, refuse_sizes, require_checkpoint
from spaceport.exporter.checkpoint_source import model_config, read_source, template_of
from spaceport.exporter.sar_config import CheckpointError, read_json
from support.copied_checkpoint import copy_of_tiny
from support.paths import TINY
from support.published_checkpoints import sentencepiece_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "checkpoint"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "sar_config.json", "unknown"])
def test_a_fifo_or_a_link_to_a_device_is_refused_and_not_waited_for(checkpoint: Path, name: str) -> None:
    file = checkpoint / name
    for replace in (lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero")):
        file.unlink(missing_ok=True)
        replace()
        with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
            open_checkpoint(checkpoint, TokenFlags())
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_json(file)


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
def test_an_absurd_size_is_refused_before_memory_is_taken(
    checkpoint: Path, entries: dict[str, Any], message: str
) -> None:
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | entries))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(checkpoint, TokenFlags())


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/model.safetensors", "a/../../b.safetensors", "a/b", "..", "", "a\0"]
)
def test_an_index_names_files_beside_it_only(checkpoint: Path, name: str) -> None:
    index = checkpoint / "model.safetensors.index.json"
    (checkpoint / "model.safetensors").rename(checkpoint / "a.safetensors")
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": name}}))
    message = (
        f"^{index}: weight_map has the file {re.escape(repr(name))}: expected the names of files beside the index; "
    )
    with pytest.raises(CheckpointError, match=message):
        require_checkpoint(checkpoint)
    index.write_text(json.dumps({"weight_map": {"x": 1}}))
    with pytest.raises(
        CheckpointError, match="weight_map is invalid: expected the file of each tensor; copy or download"
    ):
        require_checkpoint(checkpoint)
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    require_checkpoint(checkpoint)


def test_usual_sizes_are_accepted_and_numbers_of_too_many_digits_are_no_json(checkpoint: Path) -> None:
    sizes = {"hidden_size": 16384, "num_hidden_layers": 126, "vocab_size": 262144, "max_position_embeddings": 10485760}
    refuse_sizes(Path("config.json"), {**sizes, "num_parameters": 10**12, "quantization": [{"bits": 4, "tie": True}]})
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


def test_slow_and_word_level_tokenizers_are_read_as_fast_ones(tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path / "slow", tokenizer=None, tokenizer_config=None)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}), "utf-8")
    tokenizer = read_source(folder, remote_code=False).load_tokenizer().backend_tokenizer
    slow = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    sample = "the answer of the tower is the ship"
    assert tokenizer.encode(sample, add_special_tokens=False).ids == slow.encode(sample)
    assert tokenizer.decode(slow.encode(sample)) == sample
    folder = copy_of_tiny(tmp_path / "words")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "[UNK]"}), "utf-8")
    assert read_source(folder, remote_code=False).load_tokenizer().backend_tokenizer.encode("a b c").ids == [0, 1, 2]


@pytest.mark.parametrize("kind", ["t5", "vit", None])
def test_a_model_that_generates_no_text_by_itself_is_refused(kind: str | None, tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path / "c", config={"model_type": kind})
    with pytest.raises(CheckpointError, match=r"config\.json: .*expected one such as llama, qwen3 or mistral"):
        model_config(folder)


def test_the_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    tokenizer = read_source(copy_of_tiny(tmp_path / "c"), remote_code=False).load_tokenizer()
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    assert template_of(tokenizer) == "a"
    tokenizer.chat_template = {"tool_use": "b"}
    assert template_of(tokenizer) is None
