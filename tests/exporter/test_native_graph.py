"""Native graphs: logits of every family near those in float32, and equal bytes in any layout, with and without adapters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper
from transformers import PreTrainedModel

from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.native_graph import OPSET, NativeGraph
from spaceport.exporter.native_weights import Matrix, RoundedWeights, rounded
from spaceport.graphs import find_parts
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.manifest import DATA_FILE, MODEL_FILE
from spaceport.graphs.gated import ALL_LINEAR, adapter_state, gate_model, uniform_rows
from spaceport.graphs.heads import Heads, expected_shapes
from spaceport.graphs.mechanism import InputRows
from spaceport.graphs.parts import Experts, Linear, Mlp
from spaceport.kernels.functions import nodes_of
from spaceport.kernels.native_library import DOMAIN
from spaceport.kernels.packing import WEIGHT_FORMATS, packed_bytes, quantize
from support.families import VOCAB, build, family_of
from support.layouts import Layout, fed
from support.mask_rows import require_other_mask_rows_alone
from support.native_models import SUPPORTED, NativeFiles, NativeModel, built, rms, rounded_logits, tokens
from support.native_operators import library, options
from support.published import write_checkpoint

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

Array = NDArray[np.float32]

TEXT = tokens(40, VOCAB)
MASK = 5

# Root mean square of differences, relative to that of the logits. Weights of these models are random and large, so that
# a part which is left out changes logits by more than 0.1, and rounding keys and values by up to 0.04.
ROUNDING, WITHOUT_LIBRARY = 0.05, 0.02

# Operators of the graph of a family of two layers besides five native ones for each layer, Embed and Head.
TURNS = {"Reshape": 1, "Cast": 1, "Mul": 1, "Cos": 1, "Sin": 1}
SLICED = TURNS | {"Slice": 2}  # heads of 16 or less channels: whole vectors of angles are computed
STANDARD = {
    "llama": SLICED,
    "glm4": SLICED | {"RMSNormalization": 4, "Add": 4},
    "gemma3": SLICED | {"RMSNormalization": 4, "Add": 4, "Mul": 2, "Cos": 2, "Sin": 2, "Slice": 4},
    "olmo2": SLICED | {"RMSNormalization": 8, "Add": 4, "Split": 2, "Concat": 2},
    "smollm3": SLICED | {"Mul": 2, "Add": 1},
    "llama, yarn rope": SLICED | {"Mul": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@cache
def native(name: str) -> NativeModel:
    return NativeModel.of(built(name))


@cache
def written(name: str, format_name: str, folder: Path) -> NativeFiles:
    return native(name).write(folder / f"{name} {format_name}", format_name)


def typical(found: Array, expected: Array) -> float:
    """The median of the errors of rows: in a few of them, a rounded state chooses other experts."""
    return float(np.median([rms(*rows) for rows in zip(found, expected, strict=True)]))


def kinds(files: NativeFiles) -> Counter[str]:
    graph = onnx.load(files.folder / MODEL_FILE, load_external_data=False).graph
    return Counter(f"native {node.op_type}" if node.domain == DOMAIN else node.op_type for node in nodes_of(graph))


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_graph_has_the_logits_of_the_model_up_to_rounding(name: str, folder: Path) -> None:
    files = written(name, "int8", folder)
    onnx.checker.check_model(str(files.folder / MODEL_FILE), full_check=True)
    found = fed(files.engine(), TEXT, Layout((40,)))
    standard = fed(files.engine(with_library=False), TEXT, Layout((40,)))
    expected = rounded_logits(built(name), TEXT)
    error = typical if family_of(name).structure == "experts" else rms
    print(f"{error(found, expected):.3f} {error(standard, found):.3f}")  # pytest -rP shows it
    assert error(found, expected) <= ROUNDING
    assert error(standard, found) <= WITHOUT_LIBRARY
    assert error(found, native(name).float_logits(TEXT)) <= 2 * ROUNDING


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_an_int4_graph_has_the_logits_of_weights_of_four_bits(name: str, folder: Path) -> None:
    files = written(name, "int4", folder)
    found = fed(files.engine(), TEXT, Layout((40,)))
    assert rms(found, rounded_logits(built(name), TEXT, "int4")) <= ROUNDING
    assert rms(found, native(name).float_logits(TEXT)) > ROUNDING
    assert rms(fed(files.engine(with_library=False), TEXT, Layout((40,))), found) <= WITHOUT_LIBRARY


def test_keys_and_values_that_heads_share_keep_eight_bits_beside_int4(folder: Path) -> None:
    formats = {"qwen2": set[str](), "phi3": set[str]()}
    for name, found in formats.items():
        graph = onnx.load(written(name, "int4", folder).folder / MODEL_FILE, load_external_data=False).graph
        for node in nodes_of(graph):
            found |= {each.s.decode() for each in node.attribute if each.name == "formats"}
    assert formats["qwen2"] == {"int4_pair,int8,int8"}
    assert formats["phi3"] == {"int4_pair"}, "one matrix for all three"


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_layer_without_experts_is_five_native_nodes(name: str, folder: Path) -> None:
    found, layers = kinds(written(name, "int8", folder)), native(name).signature.layers
    parts = native(name).parts.layers[0]
    native_nodes = {kind: count for kind, count in found.items() if kind.startswith("native ")}
    behind = (parts.after_attention is not None) + (parts.after_mlp is not None)  # norms behind products
    gated = not isinstance(parts.mlp, Mlp) or parts.mlp.gated
    expected = {
        "native Embed": 1,
        "native NormProduct": layers * (1 + behind + (not gated)),
        "native Attend": layers,
        "native AddProduct": layers * (2 - behind),
        "native GateProduct": layers * gated,
        "native Head": 1,
    }
    if isinstance(parts.mlp, Experts):
        # the router, an expert's last product instead of one that adds, and three products of a shared expert
        expected["native NormProduct"] += layers * (2 + 2 * (parts.mlp.shared is not None))
        expected["native AddProduct"] -= layers
        expected["native GateProduct"] += layers * (parts.mlp.shared is not None)
    assert native_nodes == {kind: count for kind, count in expected.items() if count}
    assert isinstance(parts.mlp, Experts) or sum(native_nodes.values()) == 5 * layers + 2
    if name in STANDARD:
        assert {kind: found[kind] for kind in found.keys() - native_nodes.keys()} == STANDARD[name]


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_text_in_another_layout_has_the_same_bytes(name: str, folder: Path) -> None:
    files = written(name, "int8", folder)
    expected = fed(files.engine(), TEXT, Layout((1,)))
    layouts = (Layout((40,)), Layout((9, 1, 6), seed=1), Layout((2, 20), others=5, requests=2, seed=2))
    for threads, layout in zip((1, 2, 1), layouts, strict=True):
        found = fed(files.engine(threads=threads, requests=layout.requests), TEXT, layout)
        assert found.tobytes() == expected.tobytes()


LAYOUTS = st.builds(
    Layout,
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=12).map(tuple),
    others=st.integers(0, 12),
    requests=st.integers(1, 3),
    seed=st.none() | st.integers(0, 2**32 - 1),
)


@pytest.mark.parametrize(("name", "format_name"), [("mistral", "int8"), ("gemma2", "int4")])
def test_a_text_in_any_layout_has_the_same_bytes(name: str, format_name: str, folder: Path) -> None:
    files = written(name, format_name, folder)
    engines = {
        (requests, threads): files.engine(True, threads, requests) for requests in (1, 2, 3) for threads in (1, 2)
    }
    expected = fed(engines[1, 1], TEXT, Layout((1,)))

    @settings(max_examples=25)
    @given(LAYOUTS, st.integers(1, 2))
    def same_bytes(layout: Layout, threads: int) -> None:
        assert fed(engines[layout.requests, threads], TEXT, layout).tobytes() == expected.tobytes()

    same_bytes()


# Adapters of mask rows


def gated(name: str, targets: tuple[str, ...], size: float = 0.3, rank: int = 4) -> PreTrainedModel:
    """A model with random adapters that act on the rows of a mask token."""
    model = built(name)
    gate_model(model, [MASK], rank, 2 * rank, targets)
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in adapter_state(model).values():
            tensor.copy_(size * torch.randn(tensor.shape, generator=dice))
    return model


ADAPTED: dict[str, tuple[str, ...]] = {
    "qwen2": (ALL_LINEAR,),
    "phi3": (ALL_LINEAR,),  # one matrix of queries, keys and values, one of gate and up
    "gpt_neox": (ALL_LINEAR,),  # in another order
    "gemma2": (ALL_LINEAR,),  # norms behind products
    "granite": (ALL_LINEAR,),  # whose outputs have a factor
    "glm": ("k_proj", "o_proj"),
    "mistral": ("up_proj",),  # without an adapter of the gate
    "llama": ("v_proj", "gate_proj", "down_proj"),
}
MASKED = [*TEXT[:12], MASK, MASK, *TEXT[12:18], MASK, TEXT[18]]


@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_changes_mask_rows_as_in_the_model_and_no_bit_of_others(name: str, folder: Path) -> None:
    model = gated(name, ADAPTED[name])
    files = NativeModel.of(model).write(folder / f"{name} adapted")
    require_other_mask_rows_alone(written(name, "int8", folder).engine(), files.engine(), MASK, 0.1)
    found = fed(files.engine(), MASKED, Layout((len(MASKED),)))
    assert fed(files.engine(), MASKED, Layout((1, 4), others=3, seed=1)).tobytes() == found.tobytes()
    assert rms(fed(files.engine(with_library=False), MASKED, Layout((len(MASKED),))), found) <= WITHOUT_LIBRARY
    expected = rounded_logits(model, MASKED)
    assert rms(found, expected) <= ROUNDING
    with uniform_rows(model, False), torch.no_grad():
        assert rms(found, model(input_ids=torch.tensor([MASKED])).logits[0].numpy()) > 2 * ROUNDING


# What comes before and behind the layers


@pytest.mark.parametrize(("name", "scale"), [("qwen2", 1.0), ("gemma", 8.0), ("granite", 3.0)])
def test_input_rows_replace_the_embeddings_of_tokens(name: str, scale: float, folder: Path) -> None:
    model, chosen = built(name), (TEXT[3], TEXT[7])
    rows = 0.3 * torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    InputRows(chosen, rows).apply(model)
    replaced = NativeModel.of(model)
    assert replaced.parts.embedding_scale == pytest.approx(scale)
    found = fed(replaced.write(folder / f"{name} rows", input_rows=(chosen, rows)).engine(), TEXT, Layout((40,)))
    assert rms(found, rounded_logits(model, TEXT)) <= ROUNDING
    base = fed(written(name, "int8", folder).engine(), TEXT, Layout((40,)))
    assert found[:3].tobytes() == base[:3].tobytes()
    assert rms(found[3:], base[3:]) > 2 * ROUNDING


@pytest.mark.parametrize("blocks", [0, 2])
def test_draft_heads_add_lines_of_logits_to_each_row(blocks: int, folder: Path) -> None:
    model = built("qwen2")
    dice = torch.Generator().manual_seed(3)
    tensors = {
        name: 0.2 * torch.randn(shape, generator=dice) for name, shape in expected_shapes(3, blocks, 64, VOCAB).items()
    }
    Heads(3, blocks, tensors).apply(model)
    files = NativeModel.of(model).write(folder / f"heads {blocks}")
    onnx.checker.check_model(str(files.folder / MODEL_FILE), full_check=True)
    found = fed(files.engine(), TEXT, Layout((40,)))
    assert found.shape == (40, 4 * VOCAB)
    base = fed(written("qwen2", "int8", folder).engine(), TEXT, Layout((40,)))
    np.testing.assert_allclose(found[:, :VOCAB], base, rtol=0, atol=2e-2 * np.abs(base).max())
    assert rms(found, rounded_logits(model, TEXT)) <= ROUNDING
    for layout in (Layout((1,)), Layout((3, 8), others=4, requests=2, seed=1)):
        assert fed(files.engine(requests=layout.requests), TEXT, layout).tobytes() == found.tobytes()


def test_a_tied_table_is_stored_once(folder: Path) -> None:
    sizes = []
    for tied in (True, False):
        one = NativeModel.of(built("qwen2", tie_word_embeddings=tied))
        assert one.parts.tied == tied
        files = one.write(folder / f"tied {tied}")
        sizes.append((files.folder / DATA_FILE).stat().st_size)
    table = packed_bytes(WEIGHT_FORMATS["int8"], VOCAB, 64)
    assert 0 <= sizes[1] - sizes[0] - table < 4096  # parts of the file begin at pages
    for tied in (True, False):
        one = NativeModel.of(built("qwen2", tie_word_embeddings=tied))
        found = fed(NativeFiles(folder / f"tied {tied}", one.signature).engine(), TEXT, Layout((40,)))
        assert rms(found, rounded_logits(one.model, TEXT)) <= ROUNDING


def test_a_table_is_stored_once_though_the_input_rows_of_some_tokens_are_others(folder: Path) -> None:
    model = built("qwen2", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        model.model.embed_tokens.weight[[TEXT[3], MASK]] = 0.2 * torch.randn(
            2, 64, generator=torch.Generator().manual_seed(3)
        )
    files = NativeModel.of(model).write(folder / "other rows")
    text = [*TEXT, MASK]
    assert rms(fed(files.engine(), text, Layout((41,))), rounded_logits(model, text)) <= ROUNDING
    assert (files.folder / DATA_FILE).stat().st_size < 4096 + sum(
        packed_bytes(WEIGHT_FORMATS["int8"], *weight.shape) + 4096
        for name, weight in model.named_parameters()
        if weight.dim() > 1 and "embed_tokens" not in name
    )


def test_a_router_chooses_experts_with_16_bits(tmp_path: Path) -> None:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(500, 64, generator=dice)
    mlp = native("qwen3_moe").parts.layers[0].mlp
    assert isinstance(mlp, Experts)
    experts = replace(mlp, router=torch.randn(16, 64, generator=dice), normalized=True)
    model = native("qwen3_moe")
    writer = NativeGraph(tmp_path, model.parts, model.signature, RoundedWeights("int8"))
    with (tmp_path / DATA_FILE).open("wb") as writer.file:
        names = writer._routed("router", "x", experts)
    value = helper.make_tensor_value_info
    outputs = [value(names[0], TensorProto.FLOAT, None), value(names[1], TensorProto.INT64, None)]
    inputs = [value("x", TensorProto.FLOAT, ["T", 64])]
    graph = helper.make_graph(writer.nodes, "router", inputs, outputs, [*writer.initializers.values()])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    (tmp_path / MODEL_FILE).write_bytes(
        helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    )
    session = ort.InferenceSession(tmp_path / MODEL_FILE, options(), providers=["CPUExecutionProvider"])
    shares, chosen = session.run(None, {"x": x.numpy()})
    expected, best = (x @ experts.router.T).softmax(-1).topk(experts.chosen)
    assert (chosen == best.numpy()).mean() > 0.999  # rounded to 8 bits: 0.993
    np.testing.assert_allclose(shares, expected / expected.sum(-1, keepdim=True), atol=2e-3)


def test_a_large_bias_of_keys_does_not_take_the_bits_of_other_channels(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = []
    for balances in (True, False):
        model = built("qwen2", num_hidden_layers=1, layer_types=["full_attention"])
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.bias[[1, 9, 17, 25]] = 60.0
            model.model.layers[0].self_attn.q_proj.weight[[1, 9, 17, 25, 33, 41, 49, 57]] *= 0.05
            model.model.layers[0].self_attn.q_proj.bias[[1, 9, 17, 25, 33, 41, 49, 57]] *= 0.05
        if not balances:
            monkeypatch.setattr(find_parts, "_balanced", lambda parts, layer: layer)
        native_model = NativeModel.of(model)
        found = fed(native_model.write(folder / f"keys {balances}").engine(), TEXT, Layout((40,)))
        errors.append(rms(found, rounded_logits(model, TEXT)))
    print(errors)
    assert errors[0] < ROUNDING
    assert errors[0] < 0.5 * errors[1]


class MixedWeights(RoundedWeights):
    """A gate and an up matrix that cannot be stacked."""

    def linear(self, linear: Linear) -> Matrix:
        return rounded(linear.weight, "int5" if "up_proj" in linear.name else "int8")


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_gate_and_an_up_matrix_of_two_formats_are_two_nodes(name: str, folder: Path) -> None:
    files = native(name).write(folder / f"{name} mixed", MixedWeights("int8"))
    assert kinds(files)["native GateProduct"] == 0
    found = fed(files.engine(), TEXT, Layout((40,)))
    assert rms(fed(files.engine(with_library=False), TEXT, Layout((40,))), found) <= WITHOUT_LIBRARY
    model = built(name)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.up_proj.weight
            weight.copy_(torch.from_numpy(quantize(weight.numpy(), "int5").dequantized()))
    assert rms(found, rounded_logits(model, TEXT)) <= ROUNDING
    assert fed(files.engine(), TEXT, Layout((1,))).tobytes() == found.tobytes()


@pytest.mark.slow
def test_of_other_families_native_operators_compute_the_products(tmp_path: Path) -> None:
    family, sizes = family_of("ministral3"), {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 96}
    model, stages = build(replace(family, options={**family.options, **sizes})), list[str]()
    checkpoint, bundle = write_checkpoint(tmp_path / "ministral", model), tmp_path / "bundle"
    manifest = export(checkpoint, bundle, ExportOptions(FORMATS["int8"]), on_stage=stages.append)
    assert any(stage.endswith("; native operators compute its products only") for stage in stages)
    graph = onnx.load(bundle / MODEL_FILE, load_external_data=False).graph
    products = [node.op_type for node in graph.node if node.domain == DOMAIN]
    assert products == ["NormProduct"] * (7 * 2 + 1)  # seven of each layer, and the logits
    found = fed(NativeFiles(bundle, manifest.signature).engine(), TEXT, Layout((40,)))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([TEXT])).logits[0].numpy()
    assert 0 < rms(found, expected) <= 2 * ROUNDING
