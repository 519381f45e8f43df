"""Damaged graphs: one random change of a native graph, its weights or its signature, below hashes that are right."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import onnx
from onnx import GraphProto, NodeProto, TensorProto

from spaceport.graphs.contract.manifest import DATA_FILE, MANIFEST_FILE, MODEL_FILE
from spaceport.kernels.native_library import DOMAIN
from support.damaged_inputs import FLOATS, NUMBERS, TEXTS

_ROWS = ("input_ids", "position_ids", "slot_ids", "attention_mask", "logit_rows")
_SIGNATURE = ("layers", "kv_heads", "head_dim", "vocab_size", "window", "lines", "kv_cache", "lowering", "dtype")
_LOWERINGS = ("scatter", "append", "int8", "none", "float16", "float32")
_LONGEST_RUN = 4096  # bytes


def damage(folder: Path, random: Random) -> str:
    """Change one thing of a native bundle; returns what."""
    kind = random.choice(("weights", "signature", *_CHANGES, *_CHANGES))
    if kind == "weights":
        return _change_weights(folder / DATA_FILE, random)
    if kind == "signature":
        return _change_signature(folder / MANIFEST_FILE, random)
    model = onnx.load(folder / MODEL_FILE, load_external_data=False)
    what = _CHANGES[kind](model.graph, random)
    (folder / MODEL_FILE).write_bytes(model.SerializeToString())
    return f"{kind}: {what}"


def _change_weights(file: Path, random: Random) -> str:
    """Overwrite some bytes, such as with scales of NaN, whose bits are all set."""
    content = bytearray(file.read_bytes())
    begin, count = random.randrange(len(content)), random.choice((1, 4, 64, _LONGEST_RUN))
    count = min(count, len(content) - begin)
    content[begin : begin + count] = random.choice((b"\xff" * count, bytes(count), random.randbytes(count)))
    file.write_bytes(content)
    return f"weights: {count} bytes at {begin}"


def _change_signature(file: Path, random: Random) -> str:
    entries = json.loads(file.read_bytes())
    name, signature = random.choice(_SIGNATURE), entries["signature"]
    before = signature[name]
    values = [*NUMBERS, None, before + 1, before - 1, 2 * before] if isinstance(before, int) else [*_LOWERINGS, 1, 16]
    signature[name] = random.choice(values)
    file.write_text(json.dumps(entries, indent=2))
    return f"signature: {name} {before} to {signature[name]}"


def _change_attribute(graph: GraphProto, random: Random) -> str:
    """Give an attribute of a native operator another value, or leave it out."""
    node = random.choice([node for node in graph.node if node.domain == DOMAIN])
    attribute = random.choice(node.attribute)
    if random.random() < 0.1:
        node.attribute.remove(attribute)
    elif attribute.type == onnx.AttributeProto.STRING:
        attribute.s = random.choice(TEXTS).encode()
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = float(random.choice(FLOATS))
    elif attribute.type == onnx.AttributeProto.INT:
        attribute.i = int(random.choice([*NUMBERS, attribute.i + 1, attribute.i - 1]))
    elif random.random() < 0.3:
        attribute.ints.append(16)
    else:
        attribute.ints[random.randrange(len(attribute.ints))] = random.choice(NUMBERS)
    return f"{attribute.name} of {_name(node)}"


def _change_input(graph: GraphProto, random: Random) -> str:
    """Feed another value to an operator, such as positions instead of slots, or one fewer."""
    node = random.choice(graph.node)
    place = random.randrange(len(node.input))
    before = node.input[place]
    if random.random() < 0.2:
        del node.input[place:]
        return f"{_name(node)} without {before} and what follows"
    values = [*_ROWS, ""] if random.random() < 0.5 else [value for other in graph.node for value in other.output]
    values += [tensor.name for tensor in graph.initializer if random.random() < 0.2]
    node.input[place] = random.choice(values)
    return f"{_name(node)} gets {node.input[place]!r} as {before!r}"


def _change_tensor(graph: GraphProto, random: Random) -> str:
    """Change the type, a size or the place in the file of a constant."""
    tensor: TensorProto = random.choice(graph.initializer)
    kind = random.choice(("type", "size", "rank", "place"))
    if kind == "type":
        tensor.data_type = random.randrange(24)
    elif kind == "size" and tensor.dims:
        axis = random.randrange(len(tensor.dims))
        tensor.dims[axis] = random.choice(
            [*NUMBERS, tensor.dims[axis] + 1, tensor.dims[axis] - 1, tensor.dims[axis] // 2]
        )
    elif kind == "place" and tensor.external_data:
        entry: Any = random.choice(tensor.external_data)
        entry.value = str(random.choice([*NUMBERS, 64, 4096, "", "x"]))
    else:
        tensor.dims.append(1)
    return f"{kind} of {tensor.name}"


def _change_shape(graph: GraphProto, random: Random) -> str:
    """Declare another size or type of an input of the graph."""
    value = random.choice(graph.input)
    size: Any = random.choice(value.type.tensor_type.shape.dim)
    if random.random() < 0.3:
        value.type.tensor_type.elem_type = random.randrange(24)
    elif random.random() < 0.5:
        size.dim_value = random.choice(NUMBERS)
    else:
        size.dim_param = random.choice("BTASRX")
    return f"shape of {value.name}"


def _change_nodes(graph: GraphProto, random: Random) -> str:
    """Leave a node out, compute it twice, or call another operator."""
    place = random.randrange(len(graph.node))
    node = graph.node[place]
    what, kind = _name(node), random.choice(("without", "twice", "other operator"))
    if kind == "without":
        del graph.node[place]
    elif kind == "twice":
        graph.node.add().CopyFrom(node)
    else:
        other = random.choice(graph.node)
        node.op_type, node.domain = other.op_type, other.domain
    return f"{kind}: {what}"


_CHANGES = {
    "attribute": _change_attribute,
    "input": _change_input,
    "tensor": _change_tensor,
    "shape": _change_shape,
    "nodes": _change_nodes,
}


def _name(node: NodeProto) -> str:
    return f"{node.op_type} {node.output[0]}"
