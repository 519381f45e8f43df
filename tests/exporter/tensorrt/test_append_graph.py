"""Append graph: it is checked before TensorRT parses it, and attention without a kernel is decomposed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import GraphProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

from spaceport.exporter.tensorrt.append_graph import (
    append_graph,
    attention_nodes,
    check_graph,
    decompose_attention,
    fix_capacity,
    refuse_scatter,
)
from spaceport.exporter.tensorrt.to_tensorrt import Shapes, profiles
from spaceport.graphs.contract.faults import InputFault, OptionFault
from support.append_bundle import POSITIONS, VOCAB, Attending

PATH = Path("bundle/model.onnx")
CAPACITY = 128


def test_the_capacity_is_set_in_memory_and_the_file_is_unchanged(tmp_path: Path) -> None:
    attending = Attending(layers=2)
    attending.write(tmp_path / "bundle")
    before = (tmp_path / "bundle" / "model.onnx").read_bytes()
    model = append_graph(tmp_path / "bundle", attending.signature, 192)
    buffers = [value for value in (*model.graph.input, *model.graph.output) if value.name.startswith(("past", "pres"))]
    assert len(buffers) == 8
    assert [[size.dim_value for size in value.type.tensor_type.shape.dim] for value in buffers] == [[0, 2, 192, 16]] * 8
    assert b'dim_param: "S"' not in str(model.graph).encode()
    assert (tmp_path / "bundle" / "model.onnx").read_bytes() == before


def dims(value: onnx.ValueInfoProto) -> Any:
    return value.type.tensor_type.shape.dim


def fix(graph: GraphProto) -> None:
    fix_capacity(helper.make_model(graph), 64)
    dims(graph.input[5])[2].dim_value = 64


def store_a_constant_elsewhere(graph: GraphProto) -> None:
    tensor = numpy_helper.from_array(np.zeros(4, np.float32), "zeros")
    set_external_data(tensor, "weights.bin")
    graph.node.append(helper.make_node("Constant", [], ["zeros"], value=tensor))


TOKEN_TYPES = helper.make_tensor_value_info("token_type_ids", onnx.TensorProto.INT64, ["B", "T"])
SPOILS: dict[str, tuple[Callable[[GraphProto], object], str]] = {
    "of another type": (
        lambda graph: setattr(graph.input[3].type.tensor_type, "elem_type", onnx.TensorProto.FLOAT),
        r"has the input attention_mask float32 \[B, 1, T, A\], the manifest says attention_mask bool",
    ),
    "of one capacity": (fix, r"past_key_values.0.key float16 \[B, 2, 64, 16\], the manifest says .* \[B, 2, S, 16\]"),
    "with one more": (
        lambda graph: graph.input.append(TOKEN_TYPES),
        r"has the input token_type_ids int64 \[B, T\], the manifest says \(none\): export it again",
    ),
    "with one less": (lambda graph: graph.output.pop(), r"has the output \(none\), the manifest says present.0.value"),
    "stored elsewhere": (
        lambda graph: set_external_data(graph.initializer[-1], "../weights.bin"),
        r"wquery0 is stored in '../weights.bin', expected model.onnx.data: export it again",
    ),
    "with a constant stored elsewhere": (
        store_a_constant_elsewhere,
        r"zeros is stored in 'weights.bin', expected model.onnx.data: export it again",
    ),
}


@pytest.mark.parametrize("name", SPOILS)
def test_a_graph_that_does_not_match_the_signature_is_refused_with_the_difference(name: str) -> None:
    attending, (spoil, message) = Attending(), SPOILS[name]
    model = attending.model()
    check_graph(model, attending.signature, PATH)
    spoil(model.graph)
    with pytest.raises(InputFault, match=message) as raised:
        check_graph(model, attending.signature, PATH)
    assert str(raised.value).startswith(f"{PATH}: ")


def test_a_file_that_is_no_append_graph_is_refused(tmp_path: Path) -> None:
    signature = Attending().signature
    with pytest.raises(InputFault, match=r"has the scatter lowering, .* export it again with --lowering append"):
        refuse_scatter(tmp_path, replace(signature, lowering="scatter"))
    with pytest.raises(InputFault, match=r"model\.onnx: cannot be read .*: export it again"):
        append_graph(tmp_path, signature, 64)
    (tmp_path / "model.onnx").write_bytes(b"\xff" * 50)
    with pytest.raises(InputFault, match=r"model\.onnx: cannot be read .*: export it again"):
        append_graph(tmp_path, signature, 64)


def outputs(
    model: onnx.ModelProto, attending: Attending, seed: int, visible: int, rows: int
) -> list[NDArray[np.float32]]:
    """The outputs of ONNX Runtime for random inputs: logits and buffers."""
    dice, batch = np.random.default_rng(seed), 2
    mask = dice.random((batch, 1, rows, visible)) < 0.5
    mask[..., 0] = True  # every row sees a slot
    feeds: dict[str, NDArray[np.generic]] = {
        "input_ids": dice.integers(VOCAB, size=(batch, rows)),
        "position_ids": dice.integers(POSITIONS, size=(batch, rows)),
        "slot_ids": np.tile(np.arange(rows), (batch, 1)) + 3,
        "attention_mask": mask,
        "logit_rows": np.tile(np.arange(rows), (batch, 1)),
    }
    for tensor in attending.signature.past:
        shape = (batch, attending.kv_heads, CAPACITY, attending.head_dim)
        feeds[tensor.name] = dice.standard_normal(shape).astype(tensor.dtype)
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    fix_capacity(fixed, CAPACITY)
    session = ort.InferenceSession(fixed.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[NDArray[np.float32]] = session.run(None, feeds)
    return found


@settings(max_examples=12)
@given(
    heads=st.tuples(st.sampled_from((1, 2, 3)), st.sampled_from((1, 2))),
    head_dim=st.sampled_from((6, 16)),
    softcap=st.sampled_from((0.0, 2.0)),
    scale=st.sampled_from((None, 0.7)),
    shape=st.tuples(st.sampled_from((64, CAPACITY)), st.sampled_from((1, 5))),
    seed=st.integers(0, 99),
)
def test_decomposed_attention_equals_the_operator(
    heads: tuple[int, int], head_dim: int, softcap: float, scale: float | None, shape: tuple[int, int], seed: int
) -> None:
    (groups, kv_heads), (visible, rows) = heads, shape
    attending = Attending("float32", groups * kv_heads, kv_heads, head_dim, 2, softcap, scale)
    model = attending.model(seed)
    expected = outputs(model, attending, seed, visible, rows)
    assert len(attention_nodes(model)) == 2
    decompose_attention(model, attending.signature)
    assert attention_nodes(model) == []
    onnx.checker.check_model(model, full_check=True)
    for found, wanted in zip(outputs(model, attending, seed, visible, rows), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_an_attention_node_with_an_unexpected_attribute_is_not_decomposed() -> None:
    attending = Attending()
    model = attending.model()
    (node,) = attention_nodes(model)
    node.attribute.append(helper.make_attribute("is_causal", 1))
    with pytest.raises(InputFault, match="attributes is_causal: expected query, key, value, mask"):
        decompose_attention(model, attending.signature)


def test_profiles_cover_decode_and_prefill_up_to_the_requested_sizes() -> None:
    steps, prompts = profiles(Shapes(1024, 4, 64, 512), row_logits=128_256, mask_slots=3)
    assert steps == {"B": (1, 1, 4), "T": (1, 16, 64), "R": (1, 16, 64), "A": (64, 512, 1024)}
    # the logits of 512 rows exceed the limit per call, those of the largest decode step do not
    assert prompts == {"B": (1, 1, 4), "T": (1, 512, 512), "R": (1, 1, 128), "A": (64, 512, 1024)}
    _, small = profiles(Shapes(1024, 4, 64, 512), row_logits=640, mask_slots=0)
    assert small["R"] == (1, 1, 512)


@given(st.integers(0, 40), st.integers(1, 512), st.integers(128, 512), st.integers(8, 64), st.integers(2, 300_000))
def test_the_optimum_of_a_profile_is_within_its_range(
    mask_slots: int, step_rows: int, prompt_rows: int, blocks: int, vocab: int
) -> None:
    shapes = Shapes(64 * blocks, 4, min(step_rows, prompt_rows), prompt_rows)
    for profile in profiles(shapes, vocab, mask_slots):
        assert all(1 <= least <= tuned <= most for least, tuned, most in profile.values())


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ((1024, 0, 64, 512), "--max-requests is 0: expected 1 to 1024"),
        ((1024, 2000, 64, 512), "--max-requests is 2000: expected 1 to 1024"),
        ((1024, 4, 64, 127), "--prefill-rows is 127: expected 128, the maximum of a decode step, to 1024"),
        ((1024, 4, 64, 1025), "--prefill-rows is 1025: expected 128, .* to 1024, .* raise --max-seq-len"),
        ((64, 4, 64, 128), "--prefill-rows is 128: expected 128, .* to 64"),
        ((1024, 4, 0, 512), "--max-step-rows is 0: expected 1 to 512"),
        ((1024, 4, 513, 512), "--max-step-rows is 513: expected 1 to 512"),
    ],
)
def test_shapes_that_no_engine_can_have_are_refused(shapes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(OptionFault, match=re.compile(message)):
        Shapes(*shapes)
