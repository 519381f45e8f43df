"""Times whole steps of random models made of native operators: python -m spaceport.kernels.steps."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from spaceport.kernels import native_library
from spaceport.kernels.packing import WEIGHT_FORMATS, gate_order, pack, packed_bytes, quantize

ALIGNMENT = 4096  # of weights in their file, so that they are mapped


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    layers: int
    width: int
    mlp: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int = 64
    biases: bool = False  # of q, k and v

    @property
    def qkv(self) -> list[int]:
        return [self.heads * self.head_size, *[self.kv_heads * self.head_size] * 2]


SHAPES = {
    "smollm2-135m": Shape(30, 576, 1536, 49152, 9, 3),
    "qwen2.5-0.5b": Shape(24, 896, 4864, 151936, 14, 2, biases=True),
}


class ModelWriter:
    """Writes the graph of a random decoder, with its weights in a file beside it."""

    def __init__(self, folder: Path, shape: Shape, weights: str, head: str, seed: int = 0) -> None:
        self.folder, self.shape, self.weights, self.head = folder, shape, weights, head
        self.dice = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.file = (folder / "weights.data").open("wb")

    def write(self) -> Path:
        shape = self.shape
        self.matrix("embedding", self.head, shape.vocabulary, shape.width)
        self.vector("gain", np.ones(shape.width, np.float32))
        half = shape.head_size // 2
        self.vector("frequencies", (1e5 ** (-np.arange(half) / half)).astype(np.float32))
        self.angles()
        self.add("Embed", ["input_ids", "embedding"], ["x"], format=self.head, vocabulary=shape.vocabulary,
                 width=shape.width, scale=1.0)  # fmt: skip
        x = "x"
        for layer in range(shape.layers):
            x = self.layer(layer, x)
        norm = {"norm": "rms", "epsilon": 1e-6}
        inputs = [x, "logit_rows", "gain", "", "embedding"]
        self.add("Head", inputs, ["logits"], format=self.head, vocabulary=shape.vocabulary, cap=0.0, **norm)
        self.file.close()
        path = self.folder / "model.onnx"
        path.write_bytes(self.model().SerializeToString())
        return path

    def layer(self, layer: int, x: str) -> str:
        shape, format_name = self.shape, self.weights
        norm = {"norm": "rms", "epsilon": 1e-6}

        def name(part: str) -> str:
            return f"{layer}.{part}"

        qkv, biases = [], []
        for part, outputs in zip("qkv", shape.qkv, strict=True):
            qkv.append(self.matrix(name(part), format_name, outputs, shape.width))
            random = self.dice.standard_normal(outputs, dtype=np.float32)
            biases.append(self.vector(name(f"{part}_bias"), random) if shape.biases else "")
        inputs = [x, "gain", "", *(each for pair in zip(qkv, biases, strict=True) for each in pair)]
        formats = ",".join([format_name] * 3)
        self.add("NormProduct", inputs, [name("qkv")], widths=shape.qkv, formats=formats, activation="none", **norm)
        caches = [f"past.{layer}.{part}" for part in ("keys", "values", "scales")]
        updated = [f"present.{layer}.{part}" for part in ("keys", "values", "scales")]
        inputs = [name("qkv"), "cos", "sin", "slot_ids", "attention_mask", *caches]
        self.add("Attend", inputs, [name("attended"), *updated], heads=shape.heads, interleaved=0,
                 scale=shape.head_size**-0.5, cap=0.0, epsilon=1e-6)  # fmt: skip
        o = self.matrix(name("o"), format_name, shape.width, shape.qkv[0], 0.3)
        self.add("AddProduct", [name("attended"), x, o], [name("middle")], format=format_name, width=shape.width)
        gate = self.matrix(name("gate_up"), format_name, 2 * shape.mlp, shape.width)
        self.add("GateProduct", [name("middle"), "gain", "", gate], [name("gated")], format=format_name,
                 width=shape.mlp, activation="silu", **norm)  # fmt: skip
        down = self.matrix(name("down"), format_name, shape.width, shape.mlp, 0.3)
        inputs = [name("gated"), name("middle"), down]
        self.add("AddProduct", inputs, [name("out")], format=format_name, width=shape.width)
        return name("out")

    def angles(self) -> None:
        for kind, inputs, output in (
            ("Squeeze", ["position_ids", "first"], "positions"),
            ("Unsqueeze", ["positions", "last"], "column"),
            ("Cast", ["column"], "floats"),
            ("Mul", ["floats", "frequencies"], "angles"),
            ("Cos", ["angles"], "cos"),
            ("Sin", ["angles"], "sin"),
        ):
            attributes: dict[str, Any] = {"to": TensorProto.FLOAT} if kind == "Cast" else {}
            self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        self.initializers += [
            helper.make_tensor(n, TensorProto.INT64, [1], [i]) for n, i in (("first", 0), ("last", 1))
        ]

    def add(self, kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> None:
        node = helper.make_node(kind, inputs, outputs, domain=native_library.DOMAIN)
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        self.nodes.append(node)

    def matrix(self, name: str, format_name: str, outputs: int, inputs: int, factor: float = 1.0) -> str:
        weights = self.dice.standard_normal((outputs, inputs), dtype=np.float32) * np.float32(factor * inputs**-0.5)
        if name.endswith("gate_up"):
            weights = weights[gate_order(outputs // 2)]
        packed = pack(quantize(weights, format_name))
        assert packed.size == packed_bytes(WEIGHT_FORMATS[format_name], outputs, inputs)
        self.file.write(bytes(-self.file.tell() % ALIGNMENT))
        tensor = onnx.TensorProto(name=name, data_type=TensorProto.UINT8, dims=[packed.size])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "weights.data"), ("offset", self.file.tell()), ("length", packed.size)):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, str(value)
        self.file.write(packed.tobytes())
        self.initializers.append(tensor)
        return name

    def vector(self, name: str, values: NDArray[np.float32]) -> str:
        self.initializers.append(helper.make_tensor(name, TensorProto.FLOAT, values.shape, values))
        return name

    def model(self) -> onnx.ModelProto:
        shape, info = self.shape, helper.make_tensor_value_info
        inputs = [info(name, TensorProto.INT64, [1, "T"]) for name in ("input_ids", "position_ids", "slot_ids")]
        inputs.append(info("attention_mask", TensorProto.BOOL, [1, 1, "T", "A"]))
        inputs.append(info("logit_rows", TensorProto.INT64, [1, "R"]))
        outputs = [info("logits", TensorProto.FLOAT, [1, "R", shape.vocabulary])]
        for layer in range(shape.layers):
            for part in ("keys", "values", "scales"):
                dims: list[str | int | None] = [1, shape.kv_heads, "S", shape.head_size]
                kind = TensorProto.INT8
                if part == "scales":
                    dims, kind = [1, 2 * shape.kv_heads, "S"], TensorProto.FLOAT
                inputs.append(info(f"past.{layer}.{part}", kind, dims))
                outputs.append(info(f"present.{layer}.{part}", kind, dims))
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.initializers)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(native_library.DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


class Decoder:
    """A session with KV buffers that are updated in place."""

    def __init__(self, path: Path, shape: Shape, library: Path | None, slots: int, threads: int = 1) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        if library is not None:
            native_library.register(options, library)
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.shape, self.binding = shape, self.session.io_binding()
        self.buffers = []
        for layer in range(shape.layers):
            kv = (1, shape.kv_heads, slots, shape.head_size)
            for part, buffer in (
                ("keys", np.zeros(kv, np.int8)),
                ("values", np.zeros(kv, np.int8)),
                ("scales", np.zeros((1, 2 * shape.kv_heads, slots), np.float32)),
            ):
                place = ("cpu", 0, buffer.dtype.type, buffer.shape, buffer.ctypes.data)
                self.binding.bind_input(f"past.{layer}.{part}", *place)
                self.binding.bind_output(f"present.{layer}.{part}", *place)
                self.buffers.append(buffer)

    def bind(self, ids: Any, positions: Any, slots: Any, visible: NDArray[np.bool_], wanted: int | None = None) -> None:
        """Choose the rows of the next steps, and of how many of the last ones logits are wanted: of all by default."""
        rows = np.arange(len(ids))[-wanted if wanted else None :]
        self.feeds: dict[str, NDArray[Any]] = {
            name: np.array([values], np.int64)
            for name, values in zip(
                ("input_ids", "position_ids", "slot_ids", "logit_rows"), (ids, positions, slots, rows), strict=True
            )
        }
        self.feeds["attention_mask"] = np.ascontiguousarray(visible)[None, None]
        for name, value in self.feeds.items():
            self.binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(value))
        self.logits: NDArray[np.float32] = np.zeros((1, len(rows), self.shape.vocabulary), np.float32)
        place = ("cpu", 0, np.float32, self.logits.shape, self.logits.ctypes.data)
        self.binding.bind_output("logits", *place)

    def run(self) -> NDArray[np.float32]:
        self.session.run_with_iobinding(self.binding)
        logits: NDArray[np.float32] = self.logits[0]
        return logits

    def step(self, ids: Any, positions: Any, slots: Any, visible: NDArray[np.bool_]) -> NDArray[np.float32]:
        self.bind(ids, positions, slots, visible)
        logits: NDArray[np.float32] = self.run().copy()
        return logits


def bind_chain(decoder: Decoder, rows: int, cached: int, wanted: int | None, dice: np.random.Generator) -> None:
    """Rows that follow each other after `cached` slots, which they see."""
    seen = -(-(cached + rows) // 64) * 64
    visible = np.arange(seen) <= np.arange(cached, cached + rows)[:, None]
    chain = np.arange(cached, cached + rows)
    decoder.bind(dice.integers(0, decoder.shape.vocabulary, rows), chain, chain, visible, wanted)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--formats", nargs="+", default=["int4:int8"], help="Formats of the layers and of the head.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 9, 36])
    parser.add_argument("--cached", type=int, nargs="+", default=[200], help="Slots before the rows, all visible.")
    parser.add_argument("--logits", type=int, help="Last rows whose logits are computed; all by default.")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--runs", type=int, default=15, help="Runs of each, in turns; the minimum is printed.")
    parser.add_argument("--library", type=Path, default=native_library.library_path())
    parser.add_argument("--layers", type=int, help="Fewer layers than the shape has.")
    given = parser.parse_args(arguments)
    shape = SHAPES[given.shape]
    if given.layers:
        shape = Shape(**{**vars(shape), "layers": given.layers})
    dice = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        decoders = {}
        for formats in given.formats:
            place = Path(folder) / formats.replace(":", "-")
            place.mkdir()
            path = ModelWriter(place, shape, *formats.split(":")).write()
            for threads in given.threads:
                slots = max(given.cached) + max(given.rows) + 64
                decoders[formats, threads] = Decoder(path, shape, given.library, slots, threads)
        for cached in given.cached:
            for rows in given.rows:
                for decoder in decoders.values():
                    bind_chain(decoder, rows, cached, given.logits, dice)
                times: dict[tuple[str, int], list[float]] = {}
                for _ in range(given.runs):
                    for name, decoder in decoders.items():
                        begin = time.perf_counter()
                        decoder.run()
                        times.setdefault(name, []).append(time.perf_counter() - begin)
                cells = [f"{name} x{threads} {min(t) * 1e3:.2f}" for (name, threads), t in times.items()]
                print(f"{given.shape} {rows} rows after {cached}: {', '.join(cells)} ms", flush=True)


if __name__ == "__main__":
    main()
