"""Converted checkpoints: logits equal those of the published architectures, and drafts change no token."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from spaceport.exporter.checkpoint import Checkpoint, TokenFlags, load_model, open_checkpoint, quiet_libraries
from spaceport.exporter.checkpoint_files import require_checkpoint, weight_files
from spaceport.exporter.converted_checkpoint import read_state
from spaceport.graphs.contract.faults import CheckpointError
from spaceport.training.settings import TrainingSettings, TuningJob
from spaceport.training.tuning import train
from support.published_checkpoints import (
    Format,
    Published,
    chatglm_logits,
    internlm_logits,
    published,
    qwen_logits,
    write_published,
    write_weights,
)
from support.small_tokenizers import varied_texts

TOLERANCE = 2e-5  # of a logit, which are up to 20 here: float32 against float64
REFERENCES = {"chatglm": chatglm_logits, "internlm": internlm_logits, "qwen": qwen_logits}

STRUCTURES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chatglm", {}),
    ("chatglm", {"multi_query_group_num": 1, "add_qkv_bias": False}),
    ("chatglm", {"multi_query_group_num": 4, "kv_channels": 8, "num_layers": 3}),
    ("chatglm", {"rope_ratio": 50, "apply_query_key_layer_scaling": False}),
    ("internlm", {}),
    ("internlm", {"bias": False, "rotary": {"base": 5000, "type": "origin"}}),
    ("internlm", {"tie_word_embeddings": True, "num_attention_heads": 2, "num_key_value_heads": 2}),
    ("internlm", {"rotary": {"base": 10000, "type": "dynamic", "scaling_factor": 2.0}}),
    ("qwen", {}),
    ("qwen", {"tie_word_embeddings": True, "rotary_emb_base": 1000000, "rope_theta": 1000000}),
    ("qwen", {"use_dynamic_ntk": False, "use_logn_attn": False, "num_attention_heads": 2, "kv_channels": 16}),
)


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    quiet_libraries()


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(folder, TokenFlags())


def reference_logits(model: Published, ids: list[int]) -> Tensor:
    weights = {name: tensor.double() for name, tensor in model.weights.items()}
    return REFERENCES[model.family](model.config, weights, ids)


@pytest.mark.parametrize(
    ("family", "changes"), STRUCTURES, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_logits_equal_those_of_the_published_model(family: str, changes: Mapping[str, Any], tmp_path: Path) -> None:
    model = published(family, changes)
    converted: Any = load_model(opened(write_published(tmp_path, model)), "float32")
    dice = random.Random(5)
    for length in (1, 2, 17, 100, 256):  # up to the last position
        ids = [dice.randrange(500) for _ in range(length)]
        with torch.no_grad():
            found = converted(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(found.double(), reference_logits(model, ids), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_half_precision_weights_are_not_changed(format: Format, tmp_path: Path) -> None:
    model = published("chatglm")
    halves = {name: tensor.half() for name, tensor in model.weights.items()}
    loaded = load_model(
        opened(write_published(tmp_path, Published("chatglm", model.config, halves), format)), "float16"
    )
    found = {name: tensor for name, tensor in loaded.state_dict().items() if "layers.1.self_attn" in name}
    fused = halves["transformer.encoder.layers.1.self_attention.query_key_value.weight"]
    parts = [found[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(torch.cat(parts), fused)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == len(found)  # no shared memory


def with_weights(folder: Path, family: str, changes: Mapping[str, Tensor | None], **config: Any) -> Path:
    """A published checkpoint in which tensors are added, replaced or removed (None)."""
    model = published(family, config)
    weights = {name: tensor for name, tensor in {**model.weights, **changes}.items() if tensor is not None}
    return write_published(folder, Published(family, model.config, weights))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("chatglm", {"transformer.rotary_pos_emb.inv_freq": torch.ones(4)}, None),  # computed tables
        ("internlm", {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}, None),
        ("qwen", {"transformer.h.11.attn.logn_tensor": torch.ones(4)}, None),
        ("qwen", {"transformer.ln_f.weight": None}, r"tensor transformer\.ln_f\.weight is missing: expected the"),
        ("qwen", {"transformer.h.0.attn.c_attn.qweight": torch.ones(2)}, r"c_attn\.qweight is unknown"),
        ("internlm", {"model.norm.weight": torch.ones(31)}, r"model\.norm\.weight has shape \(31,\): expected \(32,\)"),
        (
            "chatglm",
            dict.fromkeys(["z", "transformer.prefix"], torch.ones(2)),
            r"transformer\.prefix and 1 more are unk",
        ),
    ],
)
def test_wrong_tensors_are_refused_before_weights_are_read(
    family: str, changes: dict[str, Tensor | None], message: str | None, tmp_path: Path
) -> None:
    folder = with_weights(tmp_path, family, changes)
    with nullcontext() if message is None else pytest.raises(CheckpointError, match=message):
        opened(folder)


@pytest.mark.parametrize(
    ("family", "embeddings"), [("internlm", "model.embed_tokens.weight"), ("qwen", "transformer.wte.weight")]
)
def test_a_tied_head_has_the_values_of_the_embeddings(family: str, embeddings: str, tmp_path: Path) -> None:
    table = published(family).weights[embeddings]
    load_model(opened(with_weights(tmp_path, family, {"lm_head.weight": table}, tie_word_embeddings=True)), "float32")
    wrong = with_weights(tmp_path, family, {"lm_head.weight": table + 1}, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"^/[^:]*: tie_word_embeddings is true, but lm_head\.weight differs fr"):
        load_model(opened(wrong), "float32")
    whole = with_weights(tmp_path, "internlm", {"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=r"^/[^:]*: tensor model\.norm\.weight has type torch\.int8: expected fl"):
        load_model(opened(whole), "float32")


def test_folders_without_weights_or_tokenizer_are_refused(tmp_path: Path) -> None:
    folder = write_published(tmp_path / "qwen", published("qwen"), "bin")
    (folder / "pytorch_model.bin").rename(folder / "other.bin")
    with pytest.raises(CheckpointError, match="its weights are pickles"):
        opened(folder)
    (folder / "other.bin").rename(folder / "pytorch_model.bin")
    (folder / "qwen.tiktoken").unlink()
    with pytest.raises(CheckpointError, match="no tokenizer in it"):
        opened(folder)


@pytest.mark.parametrize(("family", "loaded"), [("chatglm", "glm"), ("internlm", "llama"), ("qwen", "qwen2")])
def test_a_tuned_checkpoint_keeps_tokens_template_and_ends(family: str, loaded: str, tmp_path: Path) -> None:
    folder = write_published(tmp_path / "published", published(family), "bin", 2)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "the ship", "response": "the answer"}\n', "utf-8")
    train(
        TuningJob(folder, tmp_path / "tuned", (data,), TrainingSettings("sar", "embeddings", max_steps=1, batch_size=1))
    )
    before, after = opened(folder), opened(tmp_path / "tuned")
    assert (after.config.model_type, after.config.dtype) == (loaded, before.config.dtype)
    assert not require_checkpoint(tmp_path / "tuned").is_converted
    assert after.config.dtype in (torch.float16, torch.bfloat16)
    assert (after.tokens.end, after.template) == (before.tokens.end, before.template)
    texts = varied_texts(300, ("<|im_start|>", "<|im_end|>", "<|user|>", "<eoh>", "</s>"))
    tokenizers = [Tokenizer.from_str(checkpoint.tokenizer) for checkpoint in (before, after)]
    assert all(tokenizers[0].encode(text).ids == tokenizers[1].encode(text).ids for text in texts)


WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.arange(4.0), "c.weight": torch.ones(1, 1)}


class Harmful:
    """An object whose pickle runs code when it is opened."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('code of a pickle ran')",))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_all_tensors_are_read_and_a_missing_shard_is_refused(format: Format, shards: int, tmp_path: Path) -> None:
    write_weights(tmp_path, WEIGHTS, format, shards)
    if format == "safetensors":  # pickles beside safetensors are not opened
        torch.save(Harmful(), tmp_path / "pytorch_model.bin")
    elif shards == 1:  # the old format of pickles
        torch.save(WEIGHTS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    state = read_state(weight_files(tmp_path, pickles=True))
    assert state.keys() == WEIGHTS.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in WEIGHTS.items())
    for missing in tmp_path.glob("*-00002-of-00003*"):
        missing.unlink()
        with pytest.raises(CheckpointError, match=f"file {missing.name} is missing: expected 3 files, as"):
            read_state(weight_files(tmp_path, pickles=True))


TENSORS_ONLY = "cannot be read as a file of tensors: .*: expected tensors"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"pytorch_model.bin": Harmful()}, TENSORS_ONLY),
        ({"pytorch_model.bin": {"a.weight": Harmful()}}, TENSORS_ONLY),
        ({"pytorch_model.bin": [1, 2]}, "holds list: expected tensors by name; copy"),
        ({"pytorch_model.bin": {"a": 1}}, "holds dict: expected tensors by name; copy"),
        ({"pytorch_model.bin": {1: torch.ones(1)}}, "holds dict: expected tensors by name; copy"),
        ({"pytorch_model.bin": b""}, TENSORS_ONLY),
        ({"pytorch_model.bin": LFS}, TENSORS_ONLY),
        ({"model.safetensors": b""}, "cannot be read: .*: copy or download it again"),
        ({"model.safetensors": LFS}, "cannot be read: .*: copy or download it again"),
        ({"pytorch_model-1.bin": WEIGHTS, "pytorch_model-2.bin": WEIGHTS}, "a.weight is in two files: expected it"),
        ({"model.safetensors": b"", "model.safetensors.index.json": b'{"weight_map": {"a": 1}}'}, "map is invalid: ex"),
    ],
)
def test_files_of_other_things_are_refused_and_run_no_code(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            torch.save(content, tmp_path / name)
    with pytest.raises(CheckpointError, match=message):
        read_state(weight_files(tmp_path, pickles=True))
