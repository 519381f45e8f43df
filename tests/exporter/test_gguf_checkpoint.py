"""GGUF checkpoint: logits and tokens equal the original model's; what cannot be loaded exactly is refused by name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")

from gguf import GGUFReader, quants
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from spaceport.exporter import gguf_file
from spaceport.exporter.checkpoint import Checkpoint, TokenFlags, load_model, open_checkpoint, quiet_libraries
from spaceport.exporter.checkpoint_files import is_gguf, require_checkpoint
from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.gguf_checkpoint import end_tokens, gguf_config, gguf_tokenizer
from spaceport.exporter.gguf_file import read_gguf
from spaceport.graphs.contract.faults import CheckpointError, MissingDependency
from spaceport.graphs.contract.formats import FORMATS
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.training.settings import TrainingSettings, TuningJob, facts_of
from spaceport.training.tuning import train
from support.gguf_files import HEADS, KV_HEADS, gguf_name, interleaved, random_model, write_gguf
from support.paths import TINY

TYPES = {
    "token_embd.weight": "Q8_0",
    "blk.0.attn_q.weight": "F16",
    "blk.0.attn_k.weight": "BF16",
    "blk.0.attn_v.weight": "Q4_0",
    "blk.0.attn_output.weight": "Q4_1",
    "blk.0.ffn_gate.weight": "Q5_0",
    "blk.0.ffn_up.weight": "Q5_1",
    "blk.0.ffn_down.weight": "Q6_K",
    "blk.1.ffn_down.weight": "Q4_K",
    "blk.1.attn_q.weight": "F32",
}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet_libraries()
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", random_model(), TYPES)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", random_model())


def opened(file: Path) -> Checkpoint:
    return open_checkpoint(file, TokenFlags())


def test_weights_of_ten_types_are_dequantized_to_the_right_parameters(quantized: Path) -> None:
    stored = {tensor.name: tensor for tensor in GGUFReader(quantized).tensors}
    assert {tensor.tensor_type.name for tensor in stored.values()} == set(TYPES.values())
    for name, parameter in load_model(opened(quantized), "float32").named_parameters():
        weight, tensor = parameter.detach().numpy(), stored[gguf_name(name)]
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleaved(weight, HEADS if "q_proj" in name else KV_HEADS)
        np.testing.assert_array_equal(weight, quants.dequantize(tensor.data, tensor.tensor_type), err_msg=name)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_equal_those_of_the_original_model(family: str, tied: bool, tmp_path: Path) -> None:
    model = random_model(family, tied)
    changes = {f"{family}.attention.key_length": 16} if family == "qwen3" else {}
    loaded = load_model(opened(write_gguf(tmp_path / "model.gguf", model, changes=changes)), "float32")
    ids = torch.arange(40)[None] * 7 % 600
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_changed_gguf_file_prevents_a_resume(plain: Path, tmp_path: Path) -> None:
    copy = shutil.copyfile(plain, tmp_path / "model.gguf")
    job = TuningJob(copy, tmp_path / "tuned", (), TrainingSettings())
    before = facts_of(job)
    copy.write_bytes(copy.read_bytes()[:-1] + b"\0")
    assert facts_of(job) != before
    assert before["checkpoint"].startswith("model.gguf ")


@pytest.mark.nightly
@pytest.mark.slow
def test_a_gguf_file_is_exported_and_tuned(quantized: Path, tmp_path: Path) -> None:
    export(quantized, tmp_path / "bundle", ExportOptions(FORMATS["stored"]))
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "import json", "response": "import os"}\n', "utf-8")
    settings = TrainingSettings("sar", "gated-lora", max_steps=1, rank=2, batch_size=1)
    train(TuningJob(quantized, tmp_path / "tuned", (data,), settings))
    tuned = opened(tmp_path / "tuned")
    assert (tuned.drafts.mask_slots, tuned.tokens.end) == (5, (1,))
    export(tmp_path / "tuned", tmp_path / "tuned.bundle", ExportOptions())
    export(quantized, tmp_path / "plain.bundle", ExportOptions())
    with Runtime.open(tmp_path / "plain.bundle") as one, Runtime.open(tmp_path / "tuned.bundle") as drafting:
        first, second = (runtime.generate("import json", Decoding(max_tokens=12)) for runtime in (one, drafting))
    assert first.tokens == second.tokens


def test_a_missing_or_truncated_file_and_a_missing_package_are_named(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=r"model.gguf: no such file: expected a GGUF file"):
        require_checkpoint(tmp_path / "model.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert [is_gguf(path) for path in (plain, tmp_path / "folder.gguf", tmp_path)] == [True, False, False]
    (tmp_path / "model.gguf").write_bytes(plain.read_bytes()[:-4000])
    with pytest.raises(CheckpointError, match=r"not a complete GGUF file"):
        read_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(MissingDependency, match=r"needs the package gguf, .*: pip install .*\[gguf\]'"):
        read_gguf(plain)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_configuration_is_that_of_the_original_model(family: str, tied: bool, tmp_path: Path) -> None:
    model = random_model(family, tied)
    model.config.rope_parameters["rope_theta"], model.config.rms_norm_eps = 5e5, 2.0**-17  # exact in float32
    stated = {f"{family}.attention.key_length": 16, f"{family}.rope.scaling.type": "none"}
    changes = {**stated, "tokenizer.ggml.padding_token_id": None}
    found = gguf_config(read_gguf(write_gguf(tmp_path / "model.gguf", model, changes=changes))).to_dict()
    expected = model.config.to_dict()
    assert {name for name in expected if found.get(name) != expected[name]} <= {"dtype", "architectures"}


SIZES = ("embedding_length", "attention.head_count", "block_count", "feed_forward_length", "context_length")
NO_SIZES = ((0, "is 0"), ("8", "is '8'"), (True, "is True"), ([1, 2], "is an array"), (1.5, "is 1.5"))
WIDE = {"attention.key_length": 32, "rope.dimension_count": 32}
EPSILON = "attention.layer_norm_rms_epsilon"

HYPERPARAMETERS: list[tuple[dict[str, Any], str]] = [
    *(({key: None}, f"llama.{key} is missing: expected a whole number of at least 1; convert") for key in SIZES),
    *(({"block_count": value}, f"llama.block_count {found}: expected a whole number") for value, found in NO_SIZES),
    ({"attention.head_count_kv": 3}, "attention.head_count is 4: expected a multiple of 3 key and value"),
    ({"attention.head_count_kv": [2, 2]}, "attention.head_count_kv is an array"),
    ({"attention.head_count": 6}, "embedding_length is 64: expected a multiple of 6 heads"),
    ({"attention.key_length": 15, "rope.dimension_count": 15}, "the head size is 15: expected an even number"),
    (WIDE, "tensor blk.0.attn_q.weight has shape (64, 64): expected (64, 128)"),
    ({**WIDE, "rope.dimension_count": 16}, "rope.dimension_count is 16, the head size is 32: expected equal sizes"),
    ({"feed_forward_length": 128}, "tensor blk.0.ffn_gate.weight has shape (64, 256): expected (64, 128)"),
    ({"embedding_length": 128}, "llama.rope.dimension_count is 16, the head size is 32"),
    ({"block_count": 2**32 - 1}, "tensor blk.2.attn_q.weight is missing: expected the tensors of 4294967295 layers"),
    ({"vocab_size": 7}, "tensor token_embd.weight has shape (64, 628): expected (64, 7)"),
    ({EPSILON: None}, "layer_norm_rms_epsilon is missing: expected a floating"),
    ({EPSILON: 0.0}, "layer_norm_rms_epsilon is 0.0: expected a floating-point number above"),
    ({"rope.freq_base": float("inf")}, "llama.rope.freq_base is inf: expected a floating-point number above 0"),
    ({"rope.freq_base": "x"}, "llama.rope.freq_base is 'x': expected a floating-point number above 0"),
]
# Changed metadata, and a part of the message.
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({f"llama.{key}": value for key, value in changes.items()}, message) for changes, message in HYPERPARAMETERS),
    ({"general.type": "adapter"}, "general.type is 'adapter': expected a model"),
    ({"split.count": 3}, "one of 3 parts: expected a single file; merge them"),
    ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn', which cannot be loaded"),
    ({"llama.expert_count": 8}, "llama.expert_count is 8, which cannot be loaded"),
    ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama' is not supported in GGUF files: expected 'gpt2'"),
    ({"tokenizer.ggml.pre": ["a"]}, "pre-tokenizer ['a'] is not supported: expected one of llama3, "),
    ({"tokenizer.ggml.pre": "strange"}, "pre-tokenizer 'strange' is not supported: expected one of llama3, "),
    ({"tokenizer.ggml.add_eos_token": True}, "add_eos_token is true: expected false"),
    ({"tokenizer.ggml.tokens": None}, "ggml.tokens is None: expected a list of texts; convert the model again"),
    ({"tokenizer.ggml.tokens": ["a"] * 628}, "tokenizer.ggml.tokens has 'a' twice: expected different texts"),
    ({"tokenizer.ggml.token_type": None}, "tokenizer.ggml.token_type is None: expected a list of numbers"),
    ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 entries: expected one for each of 628 tokens"),
    ({"tokenizer.ggml.token_type": ["a"] * 628}, "tokenizer.ggml.token_type is ['a', 'a', "),
    ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is None: expected a list of texts"),
    ({"tokenizer.ggml.merges": ["a"]}, "merges has 'a' as entry 0: expected two tokens that make a third one"),
    ({"tokenizer.ggml.merges": ["i n", "\u4e2d b"]}, "merges has '\u4e2d b' as entry 1: expected two tokens"),
    ({"tokenizer.ggml.eos_token_id": 628}, "tokenizer.ggml.eos_token_id is 628: expected the id of one of 628 tokens"),
    ({"tokenizer.ggml.eot_token_id": 2**32 - 1}, "eot_token_id is 4294967295: expected the id of one of 628 tokens"),
    ({"tokenizer.ggml.bos_token_id": "0"}, "its metadata cannot be loaded ("),
    ({"tokenizer.ggml.eot_token_id": "0"}, "eot_token_id is '0': expected the id of one of 628 tokens"),
    ({"tokenizer.ggml.bos_token_id": None}, "bos_token_id is missing: expected the id of the token that begins a"),
    ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token is 1: expected true or false"),
    ({"tokenizer.chat_template": 3}, "tokenizer.chat_template is 3: expected text"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_metadata_that_are_wrong_or_not_supported_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        opened(write_gguf(tmp_path / "model.gguf", random_model(), changes=changes))


def test_unsupported_architectures_and_tensors_are_refused_by_name(tmp_path: Path) -> None:
    file, other = tmp_path / "model.gguf", random_model()
    other.config.model_type = "mamba"
    with pytest.raises(CheckpointError, match="'mamba' is not supported in GGUF files: expected one of llama, qwen2"):
        read_gguf(write_gguf(file, other))
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_down.weight has type TQ1_0, which is not supported: exp"):
        read_gguf(write_gguf(file, random_model(), {"blk.0.ffn_down.weight": "TQ1_0"}))
    unknown = write_gguf(file, random_model(), tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    with pytest.raises(CheckpointError, match=r"tensor rope_freqs.weight has no counterpart in a llama model"):
        opened(unknown)


# Tokenizers

TEXTS = (
    "Hello 1234 and 56",
    "a   1",
    "x = 22  # 3\n\n\tdef f(x):\n    return x's\n",
    "  leading and trailing  ",
    "Grüße, 中文 and 🎉!",
    "user\n<|start|>assistant<|end|>",
    "",
)


def metadata(tmp_path: Path, **changes: Any) -> Any:
    named = {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    return read_gguf(write_gguf(tmp_path / "model.gguf", random_model(), changes=named))


def test_tokenization_equals_the_original_tokenizer(tmp_path: Path) -> None:
    original = AutoTokenizer.from_pretrained(TINY)
    tokenizer = gguf_tokenizer(metadata(tmp_path))
    for text in TEXTS:
        assert tokenizer(text).input_ids == original(text).input_ids, text
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "12"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == original.apply_chat_template(turns, tokenize=False)
    assert tokenizer.special_tokens_map == original.special_tokens_map


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(*before: Any, own: bool) -> Any:
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)])


def split(digits: str) -> Any:
    return pre_tokenizers.Split(Regex(_WORDS + digits + _REST), "isolated")


@pytest.mark.parametrize(
    ("pre", "splits", "words_first"),
    [
        ("gpt-2", byte_level(own=True), False),
        ("smollm", byte_level(pre_tokenizers.Digits(individual_digits=True), own=True), False),
        ("qwen2", byte_level(split(r"\p{N}"), own=False), False),
        ("llama-bpe", byte_level(split(r"\p{N}{1,3}"), own=False), True),
    ],
)
def test_the_pre_tokenizer_is_the_one_that_the_file_names(
    pre: str, splits: Any, words_first: bool, tmp_path: Path
) -> None:
    expected = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    expected.pre_tokenizer = splits
    expected.model.ignore_merges = words_first
    tokenizer = gguf_tokenizer(metadata(tmp_path, ggml__pre=pre))
    for text in TEXTS:
        assert tokenizer(text).input_ids == expected.encode(text).ids, text


def test_bos_and_end_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    for adds, pre, bos in ((True, "gpt-2", [0]), (False, "gpt-2", []), (None, "llama-bpe", [0])):
        tokenizer = gguf_tokenizer(metadata(tmp_path, ggml__add_bos_token=adds, ggml__pre=pre))
        assert tokenizer("a").input_ids[:-1] == bos
    file = metadata(tmp_path, ggml__eot_token_id=3, ggml__eom_token_id=1)
    assert end_tokens(file) == [1, 3]
    assert open_checkpoint(file.path, TokenFlags()).tokens.end == (1, 3)
