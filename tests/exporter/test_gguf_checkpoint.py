"""GGUF checkpoint: weights equal an independent dequantization, logits equal the original model's."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")

from gguf import GGUFReader

from spaceport.exporter.checkpoint import Checkpoint, CheckpointError, TokenFlags, load_model, open_checkpoint
from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.quiet import quiet_libraries
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.tune.inputs import identity_of
from spaceport.tools.tune.job import TuningJob
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.tuning import tune
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


def opened(file: Path) -> Checkpoint:
    return open_checkpoint(file, TokenFlags())


# Independent dequantization: one block at a time, from the description of the formats


def half(block: bytes, offset: int) -> float:
    return float(struct.unpack_from("<e", block, offset)[0])


def nibbles(block: bytes, offset: int) -> list[int]:
    """Low nibbles of 16 bytes, then their high nibbles."""
    part = block[offset : offset + 16]
    return [byte & 15 for byte in part] + [byte >> 4 for byte in part]


def fifth_bits(block: bytes, offset: int) -> list[int]:
    (bits,) = struct.unpack_from("<I", block, offset)
    return [bits >> index & 1 for index in range(32)]


def q4_0(block: bytes) -> list[float]:
    return [half(block, 0) * (code - 8) for code in nibbles(block, 2)]


def q4_1(block: bytes) -> list[float]:
    return [half(block, 0) * code + half(block, 2) for code in nibbles(block, 4)]


def q5_0(block: bytes) -> list[float]:
    codes = zip(nibbles(block, 6), fifth_bits(block, 2), strict=True)
    return [half(block, 0) * ((low | high << 4) - 16) for low, high in codes]


def q5_1(block: bytes) -> list[float]:
    codes = zip(nibbles(block, 8), fifth_bits(block, 4), strict=True)
    return [half(block, 0) * (low | high << 4) + half(block, 2) for low, high in codes]


def q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * code for code in struct.unpack_from("<32b", block, 2)]


def q4_k(block: bytes) -> list[float]:
    scales, values = block[4:16], []
    for sub in range(8):  # 32 weights each
        if sub < 4:
            scale, least = scales[sub] & 63, scales[sub + 4] & 63
        else:
            scale = scales[sub + 4] & 15 | scales[sub - 4] >> 6 << 4
            least = scales[sub + 4] >> 4 | scales[sub] >> 6 << 4
        part = block[16 + sub // 2 * 32 :][:32]
        codes = [byte >> 4 if sub % 2 else byte & 15 for byte in part]
        values += [half(block, 0) * scale * code - half(block, 2) * least for code in codes]
    return values


def q6_k(block: bytes) -> list[float]:
    scales = struct.unpack_from("<16b", block, 192)
    values = []
    for index in range(256):
        part, within = divmod(index, 128)
        quarter, offset = divmod(within, 32)
        low = block[part * 64 + quarter % 2 * 32 + offset] >> (4 if quarter > 1 else 0) & 15
        high = block[128 + part * 32 + offset] >> 2 * quarter & 3
        values.append(half(block, 208) * scales[index // 16] * ((low | high << 4) - 32))
    return values


BLOCKS: dict[str, tuple[int, Callable[[bytes], list[float]]]] = {
    "Q4_0": (18, q4_0),
    "Q4_1": (20, q4_1),
    "Q5_0": (22, q5_0),
    "Q5_1": (24, q5_1),
    "Q8_0": (34, q8_0),
    "Q4_K": (144, q4_k),
    "Q6_K": (210, q6_k),
    "F32": (4, lambda block: [struct.unpack("<f", block)[0]]),
    "F16": (2, lambda block: [half(block, 0)]),
    "BF16": (2, lambda block: [struct.unpack("<f", b"\0\0" + block)[0]]),
}


def dequantized(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file in llama.cpp's layout."""
    found = {}
    for tensor in GGUFReader(file).tensors:
        size, decode = BLOCKS[tensor.tensor_type.name]
        data = tensor.data.tobytes()
        values = [value for start in range(0, len(data), size) for value in decode(data[start : start + size])]
        found[tensor.name] = np.array(values, np.float32).reshape(tensor.shape[::-1])
    return found


def test_ten_tensor_types_equal_an_independent_dequantization(quantized: Path) -> None:
    expected = dequantized(quantized)
    assert {tensor.tensor_type.name for tensor in GGUFReader(quantized).tensors} == set(TYPES.values())
    for name, parameter in load_model(opened(quantized), "float32").named_parameters():
        weight = parameter.detach().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleaved(weight, HEADS if "q_proj" in name else KV_HEADS)
        # K-quants multiply float32 factors in another order
        np.testing.assert_allclose(weight, expected[gguf_name(name)], rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_equal_those_of_the_original_model(family: str, tied: bool, tmp_path: Path) -> None:
    model = random_model(family, tied)
    changes = {f"{family}.attention.key_length": 16} if family == "qwen3" else {}
    loaded = load_model(opened(write_gguf(tmp_path / "model.gguf", model, changes=changes)), "float32")
    ids = torch.arange(40)[None] * 7 % 600
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_loaded_model_has_no_quantizer_and_can_be_saved(quantized: Path, tmp_path: Path) -> None:
    model = load_model(opened(quantized), "float32")
    for owner, name in ((model, "hf_quantizer"), (model, "is_quantized"), (model.config, "quantization_config")):
        assert not getattr(owner, name, None), name
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()


def test_a_tensor_without_a_counterpart_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model(), tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    with pytest.raises(CheckpointError, match=r"tensor rope_freqs.weight has no counterpart in LlamaForCausalLM"):
        load_model(opened(file), "float32")


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", random_model(), changes={"llama.block_count": 3})
    with pytest.raises(
        CheckpointError, match=r"tensor blk.2.attn_q.weight is missing: expected the tensors of 3 layers"
    ):
        opened(file)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_gguf_file_is_exported_and_tuned(quantized: Path, tmp_path: Path) -> None:
    stages: list[str] = []
    export(quantized, tmp_path / "bundle", ExportOptions(weights="int8"), on_stage=stages.append)
    assert any("relative RMS error of quantized weights: " in stage for stage in stages)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "import json", "response": "import os"}\n', "utf-8")
    settings = TrainingSettings("sar", "gated-lora", max_steps=1, rank=2, batch_size=1)
    tune(TuningJob(quantized, tmp_path / "tuned", (data,), settings))
    tuned = open_checkpoint(tmp_path / "tuned", TokenFlags())
    assert tuned.max_mask_slots == 5
    assert tuned.tokens.end == (1,)
    export(tmp_path / "tuned", tmp_path / "tuned.bundle", ExportOptions())
    export(quantized, tmp_path / "plain.bundle", ExportOptions())
    with Runtime.open(tmp_path / "plain.bundle") as plain, Runtime.open(tmp_path / "tuned.bundle") as drafting:
        one, other = (runtime.generate("import json", Decoding(max_tokens=12)) for runtime in (plain, drafting))
    assert one.tokens == other.tokens


def test_a_changed_gguf_file_prevents_a_resume(quantized: Path, tmp_path: Path) -> None:
    copy = shutil.copyfile(quantized, tmp_path / "model.gguf")
    job = TuningJob(copy, tmp_path / "tuned", (), TrainingSettings())
    before = identity_of(job)
    copy.write_bytes(copy.read_bytes()[:-1] + b"\0")
    assert identity_of(job) != before
    assert before["checkpoint"][0].startswith("model.gguf ")
    assert TINY.is_dir()
