"""Bundles from streamed weights have the bytes of bundles from weights in memory, and need the memory of one layer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from spaceport.exporter.checkpoint import TokenFlags, load_model, open_checkpoint
from spaceport.exporter.export import ExportOptions, build_decoder
from spaceport.exporter.quantization_scales import write_scales
from spaceport.exporter.to_onnx import to_onnx
from spaceport.graphs.streamed_weights import source_of, values_of
from support.paths import TINY

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def content(checkpoint: Path, target: Path, options: ExportOptions, scratch: Path | None) -> dict[str, bytes]:
    """The files that hold the weights of a bundle."""
    opened = open_checkpoint(checkpoint, options.tokens)
    decoder, _ = build_decoder(opened, options, scratch=scratch)
    streamed = {name for name, tensor in decoder.named_parameters() if source_of(tensor) is not None}
    assert bool(streamed) == (scratch is not None)
    target.mkdir()
    to_onnx(decoder, target, options.opset)
    if decoder.quantization.integers is not None:
        write_scales(target, decoder.quantization.integers)
    return {file.name: file.read_bytes() for file in target.iterdir()}


def require_equal_bundles(checkpoint: Path, folder: Path, options: ExportOptions) -> None:
    in_memory = content(checkpoint, folder / "in-memory", options, None)
    assert content(checkpoint, folder / "streamed", options, folder) == in_memory


def test_a_bundle_from_streamed_weights_has_the_bytes_of_one_from_weights_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory = content(TINY, tmp_path / "in-memory", options := ExportOptions(weights="int4"), None)
    monkeypatch.setattr("spaceport.graphs.streamed_weights._PART", 1000)  # several parts of each matrix
    assert content(TINY, tmp_path / "streamed", options, tmp_path) == in_memory


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        *(ExportOptions(lowering, dtype) for lowering in ("scatter", "append") for dtype in ("float32", "bfloat16")),
        *(ExportOptions("append", "float16", weights) for weights in ("int4", "float8")),
        ExportOptions("append", "float16", "int8", requested_activations="float"),
        *(ExportOptions(weights="int8", requested_activations=kind) for kind in ("int8x2", "int8", "float")),
        ExportOptions("append", weights="int8"),
        ExportOptions(dtype="bfloat16", weights="float8"),
        ExportOptions(weights="int4", requested_activations="float"),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["tiny", "qwen2", "gemma"])
def test_every_kind_of_bundle_is_the_same_from_streamed_weights(
    family: str, options: ExportOptions, tmp_path: Path
) -> None:
    require_equal_bundles(TINY if family == "tiny" else saved(family, tmp_path / family), tmp_path, options)


def saved(family: str, folder: Path) -> Path:
    """A small checkpoint in bfloat16: qwen2 with tied embeddings and biases, gemma with scaled embeddings."""
    torch.manual_seed(0)
    vocabulary = int(open_checkpoint(TINY, TokenFlags()).config.vocab_size)
    if family == "gemma":
        model: Any = GemmaForCausalLM(GemmaConfig(vocab_size=vocabulary, **SMALL))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, tie_word_embeddings=True, **SMALL))
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "sar_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    return folder


def test_streamed_weights_have_the_values_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(TINY, TokenFlags())
    expected = dict(load_model(checkpoint, "bfloat16").named_parameters())
    model = load_model(checkpoint, "bfloat16", tmp_path)
    assert model.generation_config.to_dict() == load_model(checkpoint, "bfloat16").generation_config.to_dict()
    for name, tensor in model.named_parameters():
        assert (source_of(tensor) is not None) == (tensor.dim() > 1)
        assert torch.equal(values_of(tensor), expected[name])


LAYER = 4 * (4 * 640 * 640 + 3 * 640 * 1920)  # bytes in float32: 21 MB
EXPORT = """
import sys, threading, time
from pathlib import Path
from spaceport.exporter.export import ExportOptions, export

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def sample():
    while True:
        peak.append(anonymous())
        time.sleep(0.005)

peak = []
folder, target, weights = sys.argv[1:]
threading.Thread(target=sample, daemon=True).start()
export(Path(folder), Path(target), ExportOptions(weights=weights))
print(max(peak))
"""


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("weights", ["same", "int4", "int8"])
def test_memory_does_not_grow_with_the_weights_of_further_layers(weights: str, tmp_path: Path) -> None:
    peaks = {}
    for layers in (2, 40):
        folder = tmp_path / str(layers)
        script = Path(__file__).parents[2] / "docs" / "drawing" / "random_checkpoint.py"
        sizes = ["--layers", str(layers), "--hidden", "640", "--inner", "1920", "--heads", "10", "--kv-heads", "5"]
        command = [sys.executable, str(script), str(folder), "--tokenizer", str(TINY), "--vocab", "512", *sizes]
        subprocess.run(command, check=True, capture_output=True)
        command = [sys.executable, "-c", EXPORT, str(folder), str(tmp_path / f"{layers}.bundle"), weights]
        peaks[layers] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    graph = 38 * 8_000_000  # of the traced graph without weights
    assert peaks[40] - peaks[2] <= 0.3 * LAYER + graph
