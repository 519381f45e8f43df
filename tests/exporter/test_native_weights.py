"""Matrices of native graphs: those of a GGUF file hold its weights exactly, in the order that the model has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray
from torch import Tensor, nn

from spaceport.exporter.checkpoint import TokenFlags, load_model, open_checkpoint, quiet_libraries
from spaceport.exporter.export import ExportOptions, estimate_export, export
from spaceport.exporter.gguf_file import GgufFile, GgufTensor, read_gguf
from spaceport.exporter.native_weights import (
    Matrix,
    RoundedWeights,
    StoredWeights,
    gate_matrix,
    other_rows,
    rounded,
    stacked,
)
from spaceport.graphs.contract import formats
from spaceport.graphs.contract.faults import CheckpointError
from spaceport.graphs.contract.manifest import DATA_FILE
from spaceport.graphs.parts import DecoderParts, Linear
from spaceport.kernels.gguf_weights import GGUF_BLOCKS
from spaceport.kernels.packing import WEIGHT_FORMATS, gate_order, pack, quantize
from support.gguf_files import random_blocks, random_model, write_gguf
from support.layouts import Layout, fed
from support.native_models import NativeModel, rms, rounded_logits, tokens
from support.native_operators import library

FORMATS = {
    "Q4_0": "int4",
    "Q4_1": "int4",
    "Q4_K": "int4_k",
    "Q5_0": "int5",
    "Q5_1": "int5_min",
    "Q5_K": "int5_k",
    "Q6_K": "int8_k16",
    "Q8_0": "int8",
}
OUTPUTS, INPUTS = 72, 512


def file_of(
    folder: Path, tensors: Mapping[str, str], architecture: str = "qwen2"
) -> tuple[GgufFile, dict[str, Tensor]]:
    """A file with the data of these tensors, by name with their type, and their weights."""
    found, weights, content = {}, {}, b""
    for seed, (name, kind) in enumerate(tensors.items()):
        if kind in ("F16", "F32"):
            values = np.random.default_rng(seed).standard_normal((OUTPUTS, INPUTS)).astype(f"<f{int(kind[1:]) // 8}")
            blocks = values.view(np.uint8)
        else:
            blocks = random_blocks(kind, (OUTPUTS, INPUTS), seed)
            values = quants.dequantize(blocks, GGMLQuantizationType[kind])
        found[name] = GgufTensor(kind, (INPUTS, OUTPUTS), len(content), len(content) + blocks.size)
        weights[name] = torch.from_numpy(values.astype(np.float32))
        content += blocks.tobytes()
    (folder / "tensors").write_bytes(content)
    return GgufFile(folder / "tensors", architecture, {}, found), weights


def linear_of(weight: Tensor, name: str, factor: Tensor | None = None) -> Linear:
    module = nn.Linear(weight.shape[1], len(weight), bias=False)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return Linear(module, f"model.layers.3.{name}", factor=factor)


def values(matrix: Matrix) -> NDArray[np.float32]:
    return matrix.read(np.arange(matrix.outputs)).dequantized()


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_a_matrix_holds_the_weights_of_the_file(kind: str, tmp_path: Path) -> None:
    file, weights = file_of(tmp_path, {"blk.3.ffn_up.weight": kind, "blk.3.attn_q.weight": kind})
    stored = StoredWeights(file, 4, 2)
    for name, weight in (("mlp.up_proj", "blk.3.ffn_up.weight"), ("self_attn.q_proj", "blk.3.attn_q.weight")):
        matrix = stored.linear(linear_of(weights[weight], name))
        assert (matrix.format.name, matrix.outputs, matrix.inputs) == (FORMATS[kind], OUTPUTS, INPUTS)
        np.testing.assert_array_equal(values(matrix), weights[weight].numpy())
        packed = np.concatenate([*matrix.packed()])
        assert packed.size == matrix.bytes
        np.testing.assert_array_equal(packed, pack(matrix.read(np.arange(OUTPUTS))))
    assert stored.rounded == {}


def test_a_matrix_of_several_parts_is_packed_as_a_whole() -> None:
    weight = np.random.default_rng(0).standard_normal((2 * 4096 + 40, 32), dtype=np.float32)
    parts = [*rounded(weight, "int4").packed()]
    assert len(parts) > 1
    np.testing.assert_array_equal(np.concatenate(parts), pack(quantize(weight, "int4")))


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_factors_of_outputs_are_exact(kind: str, tmp_path: Path) -> None:
    file, weights = file_of(tmp_path, {"blk.3.attn_k.weight": kind})
    factor = 2.0 ** (torch.arange(OUTPUTS) % 17)
    linear = linear_of(weights["blk.3.attn_k.weight"], "self_attn.k_proj", factor)
    matrix = StoredWeights(file, 4, 2).linear(linear)
    np.testing.assert_array_equal(values(matrix), linear.weight.numpy())


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_queries_and_keys_of_llama_are_in_the_order_of_the_model(kind: str, tmp_path: Path) -> None:
    file, weights = file_of(tmp_path, {"blk.3.attn_q.weight": kind, "blk.3.attn_v.weight": kind}, "llama")
    heads = 9
    pairs = weights["blk.3.attn_q.weight"].view(heads, 4, 2, INPUTS)  # llama.cpp: both parts of a pair are neighbours
    own = torch.cat([pairs[:, :, 0], pairs[:, :, 1]], 1).reshape(OUTPUTS, INPUTS)
    stored = StoredWeights(file, heads, heads)
    np.testing.assert_array_equal(values(stored.linear(linear_of(own, "self_attn.q_proj"))), own.numpy())
    plain = weights["blk.3.attn_v.weight"]
    np.testing.assert_array_equal(values(stored.linear(linear_of(plain, "self_attn.v_proj"))), plain.numpy())
    with pytest.raises(CheckpointError, match=r"layers.3.self_attn.q_proj are not those of tensor blk"):
        stored.linear(linear_of(weights["blk.3.attn_q.weight"], "self_attn.q_proj"))
    with pytest.raises(CheckpointError, match=r"layers.3.self_attn.v_proj are not those of tensor blk.3.attn_v.weight"):
        stored.linear(linear_of(plain.flip(0), "self_attn.v_proj"))


@pytest.mark.parametrize("kind", ["F32", "F16", "IQ4_NL"])
def test_a_type_without_an_exact_form_is_rounded_and_named(kind: str, tmp_path: Path) -> None:
    file, weights = file_of(tmp_path, {"blk.3.ffn_up.weight": kind})
    stored = StoredWeights(file, 4, 2)
    weight = weights["blk.3.ffn_up.weight"]
    matrix = stored.linear(linear_of(weight, "mlp.up_proj"))
    assert stored.rounded == {"blk.3.ffn_up.weight": kind}
    assert matrix.format.name == "int8"
    np.testing.assert_array_equal(values(matrix), quantize(weight.numpy(), "int8").dequantized())


def test_scales_of_q4_0_that_are_too_large_are_rounded_and_named(tmp_path: Path) -> None:
    file, _ = file_of(tmp_path, {"blk.3.ffn_up.weight": "Q4_0"})
    content = bytearray(file.path.read_bytes())
    content[-18:-16] = np.float16(9000).tobytes()  # times 8 is above the range of float16
    file.path.write_bytes(content)
    blocks = np.frombuffer(bytes(content), np.uint8).reshape(OUTPUTS, -1)
    weight = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType.Q4_0))
    stored = StoredWeights(file, 4, 2)
    assert stored.linear(linear_of(weight, "mlp.up_proj")).format.name == "int8"
    assert stored.rounded == {"blk.3.ffn_up.weight": "Q4_0"}


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_rows_of_a_table_that_the_model_changed_or_added_are_rounded(kind: str, tmp_path: Path) -> None:
    file, weights = file_of(tmp_path, {"token_embd.weight": kind, "output.weight": "Q8_0"})
    own = weights["token_embd.weight"]
    added = 0.02 * torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(0))
    changed = torch.cat([own, added])
    changed[[5, 40]] *= 1.25
    stored = StoredWeights(file, 4, 2)
    matrix = stored.table(changed, output=False)
    assert (matrix.format.name, matrix.outputs) == (FORMATS[kind], OUTPUTS + 3)
    found = values(matrix)
    new = np.array([5, 40, OUTPUTS, OUTPUTS + 1, OUTPUTS + 2])
    kept = np.delete(np.arange(OUTPUTS), [5, 40])
    np.testing.assert_array_equal(found[kept], own[kept].numpy())
    np.testing.assert_array_equal(found[new], quantize(changed[new].numpy(), FORMATS[kind]).dequantized())
    np.testing.assert_array_equal(matrix.read(np.array([41, 74, 5])).dequantized(), found[[41, 74, 5]])
    assert stored.changed == {*new.tolist()}
    output = stored.table(weights["output.weight"], output=True)
    np.testing.assert_array_equal(values(output), weights["output.weight"].numpy())
    assert stored.rounded == {}


def tables_of(inputs: Tensor, outputs: Tensor) -> DecoderParts:
    parts = SimpleNamespace(embedding=nn.Embedding(1, 1), head=linear_of(outputs, "head"), tied=False)
    parts.embedding.weight = nn.Parameter(inputs, requires_grad=False)
    return cast(DecoderParts, parts)


def test_two_roundings_of_one_table_are_one_table() -> None:
    table = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    coarse, fine = (torch.from_numpy(quantize(table.numpy(), name).dequantized()) for name in ("int4", "int8"))
    assert other_rows(tables_of(coarse, fine)) == []
    assert RoundedWeights("int4").one_table(tables_of(coarse, fine))
    assert other_rows(tables_of(coarse, fine.flip(0))) is None
    assert other_rows(tables_of(coarse, fine + 0.5 * torch.randn(300, 64))) is None
    assert other_rows(tables_of(coarse, fine[1:])) is None
    coarse[[7, 299]] += 2.0
    assert other_rows(tables_of(coarse, fine)) == [7, 299]


def test_the_tables_of_a_file_are_stored_once_if_the_output_has_the_smaller_steps(tmp_path: Path) -> None:
    for kinds, merged in ((("Q5_0", "Q8_0"), True), (("Q8_0", "Q5_0"), False)):
        file, weights = file_of(tmp_path, dict(zip(("token_embd.weight", "output.weight"), kinds, strict=True)))
        stored, weight = StoredWeights(file, 4, 2), weights["output.weight"]
        assert stored.one_table(tables_of(weight, weight)) == merged
        assert [note.startswith("token_embd.weight and output.weight") for note in stored.notes] == [True] * merged
        assert not stored.one_table(tables_of(weights["token_embd.weight"], weight))


def test_the_size_of_a_bundle_is_known_from_the_types_of_a_file(tmp_path: Path) -> None:
    model = random_model("llama", False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    for kinds in (TYPES, {**TYPES, "output.weight": "Q4_0"}):  # the table is stored once and twice
        file = write_gguf(tmp_path / "model.gguf", model, kinds)
        checkpoint = open_checkpoint(file, TokenFlags())
        estimate = estimate_export(checkpoint, ExportOptions(formats.FORMATS["stored"])).bundle
        manifest = export(file, tmp_path / "bundle", ExportOptions(formats.FORMATS["stored"]), overwrite=True)
        written = (tmp_path / "bundle" / DATA_FILE).stat().st_size
        assert abs(estimate - written) < 20 * 4096  # parts of the file begin at pages
        tables = 1 if kinds is TYPES else 2
        assert (
            manifest.parameters
            == sum(p.numel() for p in model.parameters()) - (2 - tables) * model.lm_head.weight.numel()
        )


@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
@pytest.mark.parametrize("width", [64, 88])
def test_a_gate_is_stacked_above_up_and_padded_with_weights_of_zero(format_name: str, width: int) -> None:
    gate, up = np.random.default_rng(0).standard_normal((2, width, 256), dtype=np.float32)
    both = stacked([rounded(gate, format_name), rounded(up, format_name)])
    codes = quantize(np.concatenate([gate, up]), both.format.name).dequantized()
    np.testing.assert_array_equal(values(both), codes)
    some = np.array([width + 3, 2, 2 * width - 1, 0])
    np.testing.assert_array_equal(both.read(some).dequantized(), codes[some])
    padding = np.zeros((-width % 32, 256), np.float32)
    order = gate_order(width + len(padding))
    expected = np.concatenate([codes[:width], padding, codes[width:], padding])[order]
    matrix = gate_matrix(both)
    assert matrix.outputs == len(expected)
    np.testing.assert_array_equal(values(matrix), expected)
    np.testing.assert_array_equal(np.concatenate([*matrix.packed()]), pack(matrix.read(np.arange(matrix.outputs))))


# of the matrices of two layers, in this order
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
KINDS = (
    ("Q4_1", "Q5_0", "Q8_0", "Q4_0", "Q5_0", "Q8_0", "Q6_K"),
    ("Q8_0", "Q4_0", "F16", "Q5_1", "Q4_0", "Q5_1", "Q4_K"),
)
TYPES = {"token_embd.weight": "Q5_1", "output.weight": "Q8_0"} | {
    f"blk.{layer}.{name}.weight": kind
    for layer, kinds in enumerate(KINDS)
    for name, kind in zip(MATRICES, kinds, strict=True)
}


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen2", False), ("qwen3", True)])
def test_a_graph_of_a_gguf_file_computes_with_the_weights_of_the_file(family: str, tied: bool, tmp_path: Path) -> None:
    quiet_libraries()
    changes = {f"{family}.attention.key_length": 16} if family == "qwen3" else {}
    original = random_model(family, tied)
    with torch.no_grad():
        for layer in original.model.layers if family == "qwen2" else ():
            layer.self_attn.k_proj.bias[[1, 9]] = 40.0
    file = write_gguf(tmp_path / "model.gguf", original, TYPES, changes)
    model = load_model(open_checkpoint(file, TokenFlags()), "float32")
    native = NativeModel.of(model)
    stored = StoredWeights(read_gguf(file), native.parts.heads, native.parts.kv_heads)
    engine = native.write(tmp_path / "graph", stored).engine()
    text = tokens(40, 600)
    assert stored.rounded == {"blk.1.attn_v.weight": "F16"}
    assert rms(fed(engine, text, Layout((40,))), rounded_logits(model, text, "stored")) <= 0.02
