"""The native operators as model-local functions of standard ONNX operators.

A node that has the name of a custom operator and of a function runs as the operator where the library is registered,
and as the function elsewhere: the same file is fast with the library and runs everywhere without it. What a function
computes differs from the operator in the order of float sums and in weights of attention that are not rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from spaceport.kernels.native_library import DOMAIN
from spaceport.kernels.packing import (
    BLOCK,
    MINIMUM_UNIT,
    PAIR_FACTOR,
    PANEL,
    SUPERBLOCK,
    WEIGHT_FORMATS,
    WeightFormat,
)

# The name of a value, or the value of a constant: float32, the sizes of a shape, or an array.
Input = str | float | tuple[int, ...] | np.generic | NDArray[Any]

_END = np.iinfo(np.int64).max  # of an axis, whatever its length
SMALLEST = 1e-30  # blocks whose largest magnitude is not above it become 0

# A low-rank adapter: the indices of the rows that it changes, and its two matrices as int8.
_ADAPTER = ("adapted", "down", "up")

INPUTS = {
    "Embed": ("ids", "weights"),
    "NormProduct": ("x", "gain", "norm_bias", "weights", "bias", "weights2", "bias2", "weights3", "bias3", *_ADAPTER),
    "AddProduct": ("x", "residual", "weights", "bias", *_ADAPTER),
    "GateProduct": ("x", "gain", "norm_bias", "weights", "bias", *_ADAPTER),
    "Head": ("x", "rows", "gain", "norm_bias", "weights", "bias"),
    "Attend": ("qkv", "cos", "sin", "slots", "visible", "keys", "values", "scales", "q_gain", "k_gain", "sinks"),
}
OUTPUTS: dict[str, tuple[str, ...]] = dict.fromkeys(INPUTS, ("y",)) | {
    "Attend": ("y", "new_keys", "new_values", "new_scales")
}


def add_functions(model: onnx.ModelProto) -> None:
    """Give a model a function for each kind of native node in it: same attributes and same optional inputs."""
    overloads: dict[bytes, str] = {}
    opsets = [opset for opset in model.opset_import if opset.domain in ("", "ai.onnx")]
    for node in nodes_of(model.graph):
        if node.domain != DOMAIN:
            continue
        kind = onnx.NodeProto(op_type=node.op_type)
        kind.attribute.extend(sorted(node.attribute, key=lambda attribute: attribute.name))
        kind.input.extend("given" if name else "" for name in node.input)
        while kind.input and not kind.input[-1]:
            kind.input.pop()
        key = kind.SerializeToString(deterministic=True)
        if key not in overloads:
            overloads[key] = str(len(overloads))
            model.functions.append(_function(node, overloads[key], opsets))
        node.overload = overloads[key]


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph and of the graphs in it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from nodes_of(attribute.g)


def _function(node: onnx.NodeProto, overload: str, opsets: list[onnx.OperatorSetIdProto]) -> onnx.FunctionProto:
    names = INPUTS[node.op_type]
    given = {name for name, value in zip(names, node.input, strict=False) if value}
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    texts = {name: value.decode() if isinstance(value, bytes) else value for name, value in attributes.items()}
    body = _Body(given, texts)
    getattr(body, node.op_type)()
    outputs = OUTPUTS[node.op_type]
    return helper.make_function(
        DOMAIN, node.op_type, names, outputs, body.nodes, opsets, sorted(attributes), overload=overload
    )


class _Body:
    """The nodes of one function; methods return the names of values."""

    def __init__(self, given: set[str], attributes: dict[str, Any]) -> None:
        self.given, self.attributes = given, attributes
        self.nodes: list[onnx.NodeProto] = []

    def op(self, kind: str, *inputs: Input, output: str | None = None, **attributes: Any) -> str:
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        output = output or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, names, [output], **attributes))
        return output

    def constant(self, value: float | tuple[int, ...] | np.generic | NDArray[Any]) -> str:
        array = np.array(value, {float: np.float32, tuple: np.int64}.get(type(value)))
        output = f"c{len(self.nodes)}"
        self.nodes.append(helper.make_node("Constant", [], [output], value=numpy_helper.from_array(array)))
        return output

    def cast(self, value: str, to: int = TensorProto.FLOAT) -> str:
        return self.op("Cast", value, to=to)

    def part(self, value: str, begin: int, end: int, axis: int) -> str:
        return self.op("Slice", value, (begin,), (end,), (axis,))

    # Weights

    def unpacked(self, panels: str, weight_format: WeightFormat) -> str:
        """Panels (panels x bytes) as weights: panels * 32 x inputs."""
        block_bytes = PANEL * BLOCK * weight_format.bits // 8
        parts, scale_bytes = BLOCK // weight_format.scale_block, weight_format.scale_bytes
        size = block_bytes + scale_bytes * (2 if weight_format.has_minima else 1)
        header = weight_format.header_bytes
        factors: list[str] = []
        if weight_format.scales == "pair":
            halves = self.op("Unsqueeze", self.part(panels, 0, header, 1), (1,))
            factor = self.op("Mul", self.half(halves), PAIR_FACTOR)  # panels x 1 x 32
            factors = [factor, self.op("Mul", factor, float(MINIMUM_UNIT))]
            panels = self.single_blocks(self.part(panels, header, _END, 1), block_bytes, size)
        elif weight_format.scales == "superblock":
            per = SUPERBLOCK // BLOCK
            supers = self.op("Reshape", panels, (0, -1, header + per * size))
            for first in range(0, header, 2 * PANEL):  # panels x superblocks x 32 -> panels x blocks x 32
                factor = self.op("Unsqueeze", self.half(self.part(supers, first, first + 2 * PANEL, 2)), (2,))
                repeated = self.op("Tile", factor, (1, 1, per, 1))
                factors.append(self.op("Reshape", repeated, (0, -1, PANEL)))
            panels = self.op("Reshape", self.part(supers, header, header + per * size, 2), (0, -1))
        blocks = self.op("Reshape", panels, (0, -1, size))
        codes = self.codes(self.part(blocks, 0, block_bytes, 2), weight_format)  # panels x 32 x blocks x 32
        scale_part = self.part(blocks, block_bytes, block_bytes + scale_bytes, 2)
        signed = weight_format.scale_block < BLOCK
        scales = self.scales(scale_part, weight_format, factors[:1], parts, signed)  # panels x 32 x blocks x parts x 1
        split = self.op("Reshape", codes, (0, 0, 0, parts, -1))
        weights = self.op("Mul", self.op("Sub", split, float(weight_format.zero)), scales)
        if weight_format.has_minima:
            minimum_part = self.part(blocks, block_bytes + scale_bytes, size, 2)
            minima = self.scales(minimum_part, weight_format, factors[1:], 1, signed=weight_format.scales == "pair")
            weights = self.op("Sub", weights, minima)
        rows = self.op("Reshape", weights, (0, PANEL, -1))
        width = self.part(self.op("Shape", rows), 2, 3, 0)
        return self.op("Reshape", rows, self.op("Concat", (-1,), width, axis=0))

    def codes(self, blocks: str, weight_format: WeightFormat) -> str:
        """Codes of blocks (panels x blocks x bytes) as numbers: panels x 32 x blocks x 32."""
        if weight_format.bits == 8:
            groups = self.op("Reshape", blocks, (0, 0, 8, PANEL, 4))
            ordered = self.op("Transpose", groups, perm=[0, 3, 1, 2, 4])
        else:
            nibble_bytes = PANEL * BLOCK // 2
            pairs = self.op("Reshape", self.part(blocks, 0, nibble_bytes, 2), (0, 0, 2, 4, 16, 4))
            low = self.op("BitwiseAnd", pairs, np.uint8(15))
            high = self.op("BitShift", pairs, np.uint8(4), direction="RIGHT")
            both = self.op("Concat", *(self.op("Unsqueeze", each, (-1,)) for each in (low, high)), axis=-1)
            # panels, blocks, halves, pairs, outputs, inputs, groups of a pair
            ordered = self.op("Transpose", both, perm=[0, 2, 4, 1, 3, 6, 5])
            ordered = self.op("Reshape", ordered, (0, 2, 16, -1, BLOCK))
            if weight_format.bits == 5:
                fifths = self.part(blocks, nibble_bytes, nibble_bytes * 5 // 4, 2)
                ordered = self.op("BitwiseOr", ordered, self.fifth_bits(fifths))
            panels = self.part(self.op("Shape", ordered), 0, 1, 0)
            rows = self.op("Concat", panels, (PANEL, -1, BLOCK), axis=0)
            return self.cast(self.op("Reshape", ordered, rows))
        return self.cast(self.op("Reshape", ordered, (0, 0, 0, BLOCK)))

    def fifth_bits(self, words: str) -> str:
        """16 where a code has its fifth bit (panels x blocks x bytes), else 0: panels x 2 x 16 x blocks x 32."""
        places = np.arange(8, dtype=np.uint8)
        bits = self.op("BitShift", self.op("Unsqueeze", words, (-1,)), places, direction="RIGHT")
        ones = self.op("BitwiseAnd", bits, np.uint8(1))
        codes = self.op("BitShift", ones, np.uint8(4), direction="LEFT")
        groups = self.op("Reshape", codes, (0, 0, 2, 8, 16, 4))
        ordered = self.op("Transpose", groups, perm=[0, 2, 4, 1, 3, 5])
        return self.op("Reshape", ordered, (0, 2, 16, -1, BLOCK))

    def single_blocks(self, panels: str, block_bytes: int, size: int) -> str:
        """Pairs of blocks (panels x bytes) as blocks that each have codes, scales and minima: panels x bytes."""
        pairs = self.op("Reshape", panels, (0, -1, 2 * size))
        parts = [self.op("Reshape", self.part(pairs, 0, 2 * block_bytes, 2), (0, -1, block_bytes))]
        for begin in (2 * block_bytes, 2 * block_bytes + 2 * PANEL):
            values = self.op("Reshape", self.part(pairs, begin, begin + 2 * PANEL, 2), (0, 0, PANEL, 2))
            ordered = self.op("Gather", values, (1, 0), axis=3)  # the first block's before the second's
            by_block = self.op("Transpose", ordered, perm=[0, 1, 3, 2])
            parts.append(self.op("Reshape", by_block, (0, -1, PANEL)))
        return self.op("Reshape", self.op("Concat", *parts, axis=2), (0, -1))

    def scales(
        self, values: str, weight_format: WeightFormat, factors: list[str], parts: int, signed: bool = False
    ) -> str:
        """Scales or minima of blocks (panels x blocks x bytes): panels x 32 x blocks x parts x 1."""
        if weight_format.scales == "block":
            numbers = self.half(values)
        else:
            numbers = self.cast(values)
            if signed:
                above = self.op("Where", self.op("Greater", numbers, 127.0), 256.0, 0.0)
                numbers = self.op("Sub", numbers, above)
        numbers = self.op("Reshape", numbers, (0, 0, parts, PANEL))
        if factors:
            numbers = self.op("Mul", numbers, self.op("Unsqueeze", factors[0], (2,)))
        ordered = self.op("Transpose", numbers, perm=[0, 3, 1, 2])
        return self.op("Unsqueeze", ordered, (-1,))

    def half(self, values: str) -> str:
        """Pairs of bytes along the last axis as float16 numbers, without a reinterpreting cast, which ONNX lacks."""
        pairs = self.cast(self.op("Reshape", values, (0, 0, -1, 2)))
        low, high = (self.op("Squeeze", self.part(pairs, i, i + 1, 3), (3,)) for i in (0, 1))
        sign = self.op("Where", self.op("Greater", high, 127.0), -1.0, 1.0)
        rest = self.op("Mod", high, 128.0, fmod=1)
        exponent = self.op("Floor", self.op("Div", rest, 4.0))
        fraction = self.op("Add", self.op("Mul", self.op("Mod", rest, 4.0, fmod=1), 256.0), low)
        normal = self.op(
            "Mul",
            self.op("Add", self.op("Div", fraction, 1024.0), 1.0),
            self.op("Pow", 2.0, self.op("Sub", exponent, 15.0)),
        )
        denormal = self.op("Mul", fraction, float(2.0**-24))
        return self.op("Mul", sign, self.op("Where", self.op("Equal", exponent, 0.0), denormal, normal))

    # Rows

    def rounded(self, x: str, *shape: int) -> tuple[str, str]:
        """Rows as codes in blocks (rows x blocks x 32, or of another shape), and the scales of the blocks.

        The scale of a block with an infinity or a NaN is NaN.
        """
        blocks = self.op("Reshape", x, shape or (0, -1, BLOCK))
        top = self.op("ReduceMax", self.op("Abs", blocks), (-1,), keepdims=1)
        positive = self.op("Greater", top, SMALLEST)
        factor = self.op("Where", positive, self.op("Div", 127.0, top), 0.0)
        scale = self.op("Where", positive, self.op("Div", top, 127.0), 0.0)
        spoilt = self.op("ReduceSum", self.op("Mul", blocks, 0.0), (-1,), keepdims=1)
        return self.op("Round", self.op("Mul", blocks, factor)), self.op("Add", scale, spoilt)

    def normalized(self, x: str) -> str:
        kind = self.attributes["norm"]
        if kind == "none":
            return x
        if kind == "layer":
            x = self.op("Sub", x, self.op("ReduceMean", x, (-1,), keepdims=1))
        return self.scaled_norm(x, "gain", "norm_bias")

    def scaled_norm(self, x: str, gain: str, bias: str = "") -> str:
        mean = self.op("ReduceMean", self.op("Mul", x, x), (-1,), keepdims=1)
        deviation = self.op("Sqrt", self.op("Add", mean, float(self.attributes["epsilon"])))
        x = self.op("Mul", x, self.op("Div", 1.0, deviation))
        x = self.op("Mul", x, gain) if gain in self.given else x
        return self.op("Add", x, bias) if bias in self.given else x

    def product(
        self, x: str, weights: str, bias: str, format_name: str, outputs: int, beside: Sequence[str] = ()
    ) -> str:
        """Rows times a matrix; `beside` are the formats of all that the same rows are multiplied by."""
        together = 2 if "int4_pair" in (format_name, *beside) else 1
        codes, scale = self.rounded(x, 0, -1, together * BLOCK)
        rows = self.op("Reshape", self.op("Mul", codes, scale), (0, -1))
        panels = self.op("Reshape", weights, (-(-outputs // PANEL), -1))
        matrix = self.part(self.unpacked(panels, WEIGHT_FORMATS[format_name]), 0, outputs, 0)
        y = self.op("MatMul", rows, self.op("Transpose", matrix, perm=[1, 0]))
        return self.op("Add", y, bias) if bias in self.given else y

    def adapted(self, y: str, x: str, outputs: int) -> str:
        """Outputs y of rows x with what the adapter adds to some of them."""
        rank = self.attributes.get("rank", 0)
        if not rank:
            return y
        indices = self.op("Reshape", "adapted", (-1,))
        # One row more than is adapted: standard operators refuse to reshape none.
        rows = self.op("Gather", x, self.op("Concat", indices, (0,), axis=0), axis=0)
        low = self.product(rows, "down", "", "int8", rank)
        sums = self.part(self.product(low, "up", "", "int8", outputs), 0, -1, 0)
        changed = self.op("Add", self.op("Gather", y, indices, axis=0), sums)
        return self.op("ScatterND", y, self.op("Unsqueeze", indices, (1,)), changed)

    def activated(self, x: str) -> str:
        kind = self.attributes["activation"]
        if kind == "silu":
            return self.op("Mul", x, self.op("Sigmoid", x))
        if kind == "none":
            return x
        return self.op("Gelu", x, approximate="tanh" if kind == "gelu_tanh" else "none")

    def capped(self, x: str) -> str:
        cap = float(self.attributes["cap"])
        return self.op("Mul", self.op("Tanh", self.op("Div", x, cap)), cap) if cap else x

    # Operators

    def Embed(self) -> None:
        vocabulary = self.attributes["vocabulary"]
        ids = self.op("Reshape", "ids", (-1,))
        panels = self.op("Reshape", "weights", (-(-vocabulary // PANEL), -1))
        own = self.op("Gather", panels, self.op("Div", ids, np.int64(PANEL)), axis=0)
        weights = self.unpacked(own, WEIGHT_FORMATS[self.attributes["format"]])
        within = self.op("Unsqueeze", self.op("Mod", ids, np.int64(PANEL)), (1,))
        rows = self.op("Reshape", weights, (-1, PANEL, self.attributes["width"]))
        row = self.op("GatherND", rows, within, batch_dims=1)
        self.op("Mul", row, float(self.attributes["scale"]), output="y")

    def NormProduct(self) -> None:
        x = self.normalized("x")
        formats = self.attributes["formats"].split(",")
        parts = [
            self.product(x, f"weights{suffix}", f"bias{suffix}", format_name, width, formats)
            for suffix, format_name, width in zip(("", "2", "3"), formats, self.attributes["widths"], strict=False)
        ]
        y = self.adapted(self.op("Concat", *parts, axis=1), x, sum(self.attributes["widths"]))
        self.op("Identity", self.activated(y), output="y")

    def AddProduct(self) -> None:
        width = self.attributes["width"]
        y = self.product("x", "weights", "bias", self.attributes["format"], width)
        self.op("Add", self.adapted(y, "x", width), "residual", output="y")

    def GateProduct(self) -> None:
        width = self.attributes["width"]
        x = self.normalized("x")
        both = self.product(x, "weights", "bias", self.attributes["format"], 2 * width)
        halves = self.op("Reshape", self.adapted(both, x, 2 * width), (0, -1, 2, PANEL // 2))
        gate, up = (self.op("Reshape", self.part(halves, i, i + 1, 2), (0, width)) for i in (0, 1))
        self.op("Mul", self.activated(gate), up, output="y")

    def Head(self) -> None:
        vocabulary = self.attributes["vocabulary"]
        width = self.part(self.op("Shape", "x"), 1, 2, 0)
        requests = self.part(self.op("Shape", "rows"), 0, 1, 0)
        states = self.op("Reshape", "x", self.op("Concat", requests, (-1,), width, axis=0))
        chosen = self.op("GatherND", states, self.op("Unsqueeze", "rows", (2,)), batch_dims=1)
        x = self.normalized(self.op("Reshape", chosen, self.op("Concat", (-1,), width, axis=0)))
        logits = self.product(x, "weights", "bias", self.attributes["format"], vocabulary)
        shape = self.op("Concat", self.op("Shape", "rows"), (vocabulary,), axis=0)
        self.op("Reshape", self.capped(logits), shape, output="y")

    def Attend(self) -> None:
        heads = self.attributes["heads"]
        kv_heads, size = (self.part(self.op("Shape", "keys"), i, i + 1, 0) for i in (1, 3))
        rows = self.part(self.op("Shape", "qkv"), 0, 1, 0)
        states = self.op("Reshape", "qkv", self.op("Concat", rows, (-1,), size, axis=0))  # rows x heads x size
        ends = self.op("Concat", (heads,), kv_heads, kv_heads, axis=0)
        q, k, v = (f"{name}_states" for name in "qkv")
        self.nodes.append(helper.make_node("Split", [states, ends], [q, k, v], axis=1))
        q, k = (
            self.turned(self.scaled_norm(each, gain) if gain in self.given else each)
            for each, gain in ((q, "q_gain"), (k, "k_gain"))
        )
        parts = []
        for name, each in (("keys", k), ("values", v)):
            codes, scale = self.rounded(each, 0, 0, -1)
            self.scattered(name, self.cast(self.by_request(codes), TensorProto.INT8))
            parts.append(self.op("Squeeze", self.by_request(scale), (3,)))
        self.scattered("scales", self.op("Concat", *parts, axis=1))
        self.attend(q, kv_heads, size)

    def by_request(self, values: str) -> str:
        """Rows x heads x size -> requests x heads x rows of a request x size."""
        shape = self.op("Concat", self.op("Shape", "slots"), self.part(self.op("Shape", values), 1, 3, 0), axis=0)
        return self.op("Transpose", self.op("Reshape", values, shape), perm=[0, 2, 1, 3])

    def scattered(self, buffer: str, updates: str) -> None:
        """The buffer with updates at the slots of the rows, as the output of its name."""
        slots = self.op("Unsqueeze", "slots", (1,) if buffer == "scales" else (1, 3))
        indices = self.op("Expand", slots, self.op("Shape", updates))
        self.op("ScatterElements", buffer, indices, updates, output=f"new_{buffer}", axis=2)

    def turned(self, states: str) -> str:
        """Heads (rows x heads x size) rotated by the angles of their rows."""
        axis, pairs = (3, (0, 0, -1, 2)) if self.attributes["interleaved"] else (2, (0, 0, 2, -1))
        half = self.part(self.op("Shape", "cos"), 1, 2, 0)
        rotated = self.op("Add", half, half)
        both = self.op("Reshape", self.op("Slice", states, (0,), rotated, (2,)), pairs)
        first, second = (self.op("Squeeze", self.part(both, i, i + 1, axis), (axis,)) for i in (0, 1))
        cos, sin = (self.op("Unsqueeze", name, (1,)) for name in ("cos", "sin"))
        one = self.op("Sub", self.op("Mul", first, cos), self.op("Mul", second, sin))
        other = self.op("Add", self.op("Mul", second, cos), self.op("Mul", first, sin))
        turned = self.op("Concat", *(self.op("Unsqueeze", each, (axis,)) for each in (one, other)), axis=axis)
        rest = self.op("Slice", states, rotated, (_END,), (2,))
        return self.op("Concat", self.op("Reshape", turned, (0, 0, -1)), rest, axis=2)

    def attend(self, q: str, kv_heads: str, size: str) -> None:
        """Attention with stored keys and values; all tensors are requests x heads x rows or slots x size."""
        heads = self.attributes["heads"]
        seen = self.part(self.op("Shape", "visible"), 3, 4, 0)
        share = self.op("Div", (heads,), kv_heads)
        codes, q_scale = self.rounded(q, 0, 0, -1)

        def near(stored: str) -> str:
            part = self.op("Slice", stored, (0,), seen, (2,))
            return self.repeated(self.cast(part), share)

        def scales(begin: Input, end: str) -> str:
            part = self.op("Slice", self.op("Slice", "new_scales", begin, end, (1,)), (0,), seen, (2,))
            return self.repeated(self.op("Unsqueeze", part, (2,)), share)

        products = self.op("MatMul", self.by_request(codes), self.op("Transpose", near("new_keys"), perm=[0, 1, 3, 2]))
        factor = self.op("Mul", self.by_request(q_scale), float(self.attributes["scale"]))
        scores = self.capped(self.op("Mul", self.op("Mul", products, scales((0,), kv_heads)), factor))
        scores = self.op("Where", "visible", scores, -1e9)
        top = self.op("ReduceMax", scores, (-1,), keepdims=1)
        sinks = self.op("Reshape", "sinks", (1, -1, 1, 1)) if "sinks" in self.given else ""
        if sinks:
            top = self.op("Max", top, sinks)
        weights = self.op("Exp", self.op("Sub", scores, top))
        total = self.op("ReduceSum", self.op("Where", "visible", weights, 0.0), (-1,), keepdims=1)
        if sinks:
            total = self.op("Add", total, self.op("Exp", self.op("Sub", sinks, top)))
        weights = self.op("Mul", weights, scales(kv_heads, self.op("Add", kv_heads, kv_heads)))
        weights = self.op("Where", "visible", weights, 0.0)  # what is hidden may be NaN
        sums = self.op("MatMul", weights, near("new_values"))
        y = self.op("Transpose", self.op("Div", sums, self.op("Max", total, SMALLEST)), perm=[0, 2, 1, 3])
        width = self.op("Mul", (heads,), size)
        self.op("Reshape", y, self.op("Concat", (-1,), width, axis=0), output="y")

    def repeated(self, value: str, share: str) -> str:
        """What each KV head has (requests x KV heads x m x n) for each of its query heads."""
        shape = self.op("Concat", (1, 1), share, (1, 1), axis=0)
        wide = self.op("Expand", self.op("Unsqueeze", value, (2,)), shape)
        sizes = self.part(self.op("Shape", value), 2, 4, 0)
        return self.op("Reshape", wide, self.op("Concat", (0, -1), sizes, axis=0))
