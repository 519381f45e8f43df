"""External data: the reader finds every file that a graph names, and nothing makes it fail otherwise."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from spaceport.runtime.backends.external_data import external_files


def tensor(location: str) -> TensorProto:
    found = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "64"), ("length", "8")):
        found.external_data.add(key=key, value=value)
    return found


def test_tensors_in_all_parts_of_a_model_are_found() -> None:
    model = ModelProto(ir_version=11, producer_name="location")
    model.graph.initializer.append(tensor("a"))
    model.graph.initializer.append(TensorProto(name="inner", raw_data=b"location" * 9))
    model.graph.sparse_initializer.add(values=tensor("b"), indices=tensor("c"))
    node = NodeProto(op_type="If")
    node.attribute.append(AttributeProto(name="t", t=tensor("d")))
    node.attribute.append(AttributeProto(name="ts", tensors=[tensor("e")]))
    node.attribute.append(AttributeProto(name="g", g=GraphProto(initializer=[tensor("f")])))
    node.attribute.append(
        AttributeProto(name="gs", graphs=[GraphProto(node=[NodeProto(attribute=[node.attribute[0]])])])
    )
    node.attribute.append(AttributeProto(name="s", strings=[b"location", b"x"]))
    node.attribute.add(name="sp").sparse_tensor.values.CopyFrom(tensor("g"))
    model.graph.node.append(node)
    model.functions.add(name="f").node.append(NodeProto(attribute=[AttributeProto(name="t", t=tensor("h"))]))
    model.functions[0].attribute_proto.append(AttributeProto(name="t", t=tensor("i")))
    model.training_info.add().algorithm.initializer.append(tensor("j"))
    assert external_files(model.SerializeToString()) == set("abcdefghij")


def test_a_graph_with_all_its_weights_names_no_file() -> None:
    assert external_files(ModelProto(ir_version=11).SerializeToString()) == frozenset()
    assert external_files(b"") == frozenset()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a graph", "unknown wire type|ends within a value"),
        (b"\x3a\xff\x01a", "ends within a value"),
        (b"\x3a", "ends within a value"),
        (b"\x08" + b"\xff" * 20, "a number of more than ten bytes"),
        (b"\x0b", "the unknown wire type 3"),
    ],
)
def test_what_is_no_model_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        external_files(content)


@given(st.binary(max_size=60))
def test_any_content_is_read_or_refused(content: bytes) -> None:
    for start in (b"", b"\x3a" + bytes([len(content)])):
        with suppress(ValueError):
            external_files(start + content)
