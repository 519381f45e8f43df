"""Streamed weights: bundles have the same bytes as from weights in memory, and need the memory of one layer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from spaceport.exporter.checkpoint import open_checkpoint
from spaceport.exporter.export import ExportOptions, build_decoder
from spaceport.exporter.to_onnx import to_onnx
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.signature import LOWERINGS
from spaceport.graphs.decoder import Decoder
from spaceport.graphs.streamed_weights import source_of, values_of
from support.families import build, family_of
from support.paths import TINY
from support.published import write_checkpoint

KINDS = [
    *(ExportOptions(FORMATS[name], lowering) for lowering in LOWERINGS for name in ("float32", "bfloat16")),
    *(ExportOptions(FORMATS[f"float16-{weights}"]) for weights in ("int8", "int4", "float8")),
]


def decoders(checkpoint: Path, options: ExportOptions, scratch: Path) -> Iterator[Decoder]:
    """The module that is exported, with weights in memory and with streamed weights."""
    for folder in (None, scratch):
        decoder, _ = build_decoder(open_checkpoint(checkpoint, options.tokens), options, scratch=folder)
        streamed = {name for name, tensor in decoder.named_parameters() if source_of(tensor) is not None}
        matrices = {name for name, tensor in decoder.named_parameters() if tensor.dim() > 1}
        assert streamed == (matrices if folder is not None else set())
        yield decoder


def values(decoder: Decoder) -> dict[str, Tensor]:
    """The weights of a module, codes and scales of quantized layers included."""
    found = {name: values_of(tensor) for name, tensor in decoder.named_parameters()}
    for name, layer in decoder.quantization.layers.items():
        found |= {f"{name} codes": values_of(layer.codes), f"{name} scale": values_of(layer.scale)}
    return found


@pytest.mark.parametrize(
    "options",
    [
        ExportOptions(FORMATS["bfloat16"]),
        ExportOptions(FORMATS["bfloat16-float8"]),
        ExportOptions(FORMATS["float16-int4"]),
    ],
    ids=lambda options: options.format.name,
)
def test_streamed_weights_have_the_values_of_weights_in_memory(
    options: ExportOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spaceport.graphs.streamed_weights._PART", 1000)  # several parts of each matrix
    one, other = (values(decoder) for decoder in decoders(TINY, options, tmp_path))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.nightly
@pytest.mark.parametrize("options", KINDS, ids=lambda options: f"{options.format.name} {options.lowering}")
@pytest.mark.parametrize("family", ["tiny", "qwen2", "gemma"])
def test_a_bundle_from_streamed_weights_has_the_bytes_of_one_from_weights_in_memory(
    family: str, options: ExportOptions, tmp_path: Path
) -> None:
    checkpoint = TINY if family == "tiny" else saved(family, tmp_path / family)
    contents = []
    for decoder in decoders(checkpoint, options, tmp_path):
        target = tmp_path / str(len(contents))
        target.mkdir()
        to_onnx(decoder, target)
        contents.append({file.name: file.read_bytes() for file in target.iterdir()})
    assert contents[0] == contents[1]


def saved(family: str, folder: Path) -> Path:
    """A small checkpoint in bfloat16: qwen2 with tied embeddings and biases, gemma with scaled embeddings."""
    kind = family_of(family)
    sizes = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": family == "qwen2"}
    return write_checkpoint(folder, build(replace(kind, options={**kind.options, **sizes}), torch.bfloat16))


LAYER = 4 * (4 * 640 * 640 + 3 * 640 * 1920)  # bytes in float32: 21 MB
ANONYMOUS = """
import sys, threading, time
from pathlib import Path

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
"""
EXPORT = f"""{ANONYMOUS}
from spaceport.exporter.export import ExportOptions, export
from spaceport.graphs.contract.formats import FORMATS

def sample():
    while True:
        peak.append(anonymous())
        time.sleep(0.005)

peak = []
folder, target, name = sys.argv[1:]
threading.Thread(target=sample, daemon=True).start()
export(Path(folder), Path(target), ExportOptions(FORMATS[name]))
print(max(peak))
"""


def write_shards(folder: Path, layers: int) -> None:
    """Write a llama checkpoint in bfloat16 with random weights, in shards of a few layers."""
    sizes = {"hidden_size": 640, "intermediate_size": 1920, "num_attention_heads": 10, "num_key_value_heads": 5}
    config = LlamaConfig(vocab_size=512, num_hidden_layers=layers, tie_word_embeddings=False, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20MB")
    for name in ("tokenizer.json", "tokenizer_config.json", "sar_config.json"):
        shutil.copy(TINY / name, folder / name)


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("name", ["float32", "float16-int4", "int8"])
def test_memory_does_not_grow_with_the_weights_of_further_layers(name: str, tmp_path: Path) -> None:
    peaks = {}
    for layers in (2, 40):
        folder = tmp_path / str(layers)
        write_shards(folder, layers)
        command = [sys.executable, "-c", EXPORT, str(folder), str(tmp_path / f"{layers}.bundle"), name]
        peaks[layers] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    graph = 38 * 8_000_000  # of the traced graph without weights
    assert peaks[40] - peaks[2] <= 0.3 * LAYER + graph


GAPS = f"""{ANONYMOUS}
import numpy as np
from spaceport.graphs.streamed_weights import return_large_arrays

return_large_arrays()
np.ones(30 << 20, np.uint8)  # raises the limit of glibc when it is freed
before, small = anonymous(), []
for count in range(8):
    large = [np.ones((5 << 20) + (count << 18), np.uint8) for _ in range(4)]
    small.append(np.ones(100_000, np.uint8))
    del large
print(anonymous() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_freed_arrays_leave_no_gaps() -> None:
    command = [sys.executable, "-c", GAPS]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) < 4_000_000
