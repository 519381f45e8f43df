"""Draft heads: a graph has the lines of each head behind each row's own line, which stays as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from spaceport.exporter.quiet import quiet_libraries
from spaceport.exporter.to_onnx import DEFAULT_OPSET, to_onnx
from spaceport.graphs.contract.manifest import MODEL_FILE
from spaceport.graphs.contract.signature import Signature, logit_rows
from spaceport.graphs.decoder import decoder_of
from spaceport.graphs.draft_heads import add_heads, expected_shapes
from spaceport.runtime.backends.on_onnxruntime import OnnxRuntimeEngine
from spaceport.runtime.engine import Batch
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import OK
from support.gguf_files import HIDDEN, random_model
from support.published import write_checkpoint
from support.published_heads import random_heads, reference_lines, write_published_heads

COUNT, BLOCKS = 3, 2
IDS = np.random.default_rng(0).integers(5, 600, (2, 9))
WANTED = np.array([[8, 0, 3], [5, 5, 1]])  # rows with logits, of both requests


def logits_of(model: PreTrainedModel, folder: Path) -> tuple[Signature, NDArray[np.float32]]:
    """The signature of a model's graph, and its logits for IDS."""
    quiet_libraries()
    decoder, _ = decoder_of(model, "scatter", "plain")
    folder.mkdir()
    to_onnx(decoder, folder, DEFAULT_OPSET["scatter"])
    session = ort.InferenceSession(str(folder / MODEL_FILE), providers=["CPUExecutionProvider"])
    engine = OnnxRuntimeEngine(session, decoder.signature, 64, 2)
    positions = np.tile(np.arange(9), (2, 1))
    visible = np.zeros((2, 1, 9, 64), np.bool_)
    visible[..., :9] = np.tri(9, dtype=np.bool_)
    return decoder.signature, engine.run(Batch(0, IDS, positions, positions, visible, WANTED)).copy()


@pytest.mark.nightly
def test_the_lines_of_a_graph_are_the_rows_own_and_those_of_each_head(tmp_path: Path) -> None:
    model = random_model("llama", tied=False)
    vocab = model.config.vocab_size
    tensors = random_heads(COUNT, BLOCKS, HIDDEN, vocab)
    with torch.no_grad():
        hidden: Tensor = model.model(torch.from_numpy(IDS)).last_hidden_state  # behind the final norm
    rows = hidden[torch.arange(2)[:, None], torch.from_numpy(WANTED)]
    plain, without = logits_of(model, tmp_path / "plain")
    add_heads(model, COUNT, BLOCKS, tensors)
    signature, lines = logits_of(model, tmp_path / "heads")
    assert (plain.heads, plain.lines, signature.heads, signature.lines) == (0, 1, COUNT, 1 + COUNT)
    assert lines.shape == (2, 3 * (1 + COUNT), vocab)
    assert lines[:, :: 1 + COUNT].tobytes() == without.tobytes()
    for head, expected in enumerate(reference_lines(tensors, rows, COUNT, BLOCKS), 1):
        assert np.abs(lines[:, head :: 1 + COUNT] - expected.numpy()).max() < 1e-4 * float(expected.abs().max())


def test_heads_have_the_names_of_published_files() -> None:
    assert expected_shapes(2, 1, 8, 20) == {
        "0.0.linear.weight": (8, 8),
        "0.0.linear.bias": (8,),
        "0.1.weight": (20, 8),
        "1.0.linear.weight": (8, 8),
        "1.0.linear.bias": (8,),
        "1.1.weight": (20, 8),
    }
    assert expected_shapes(1, 0, 8, 20) == {"0.0.weight": (20, 8)}


def test_heads_count_as_logits_of_a_row() -> None:
    signature = Signature(2, 2, 8, 32_000, "float16", "scatter", heads=5)
    assert signature.row_logits == 6 * 32_000
    assert logit_rows(4096, 32_000) == 262
    assert logit_rows(4096, signature.row_logits) == 128
    assert signature.outputs[0].shape == ("B", "L", 32_000)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        ["--weights", "int8"],
        ["--weights", "int4"],
        ["--weights", "int4", "--activations", "float"],
        ["--weights", "float8"],
        ["--dtype", "float16"],
        ["--lowering", "append"],
    ],
)
def test_the_lines_of_heads_are_those_of_pytorch_in_every_format(options: list[str], tmp_path: Path) -> None:
    model = random_model("llama", tied=False)
    base = write_checkpoint(tmp_path / "base", model)
    heads = random_heads(COUNT, 1, HIDDEN, model.config.vocab_size)
    published = write_published_heads(tmp_path / "heads", heads)
    adapter = ["--adapter", str(tmp_path / "adapter")]
    assert run(["adopt", str(base), str(published), str(tmp_path / "adapter")]) == OK
    assert run(["export", str(base), str(tmp_path / "bundle"), *adapter, *options]) == OK
    long = ["--long-context", "40", "--threads", "1"]
    assert run(["check", str(tmp_path / "bundle"), str(base), *adapter, *long]) == OK
