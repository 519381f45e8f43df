"""The first intermediate value of a graph that differs from that of the PyTorch model, in order of computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper

from spaceport.graphs.contract.faults import MissingDependency
from spaceport.graphs.contract.manifest import MODEL_FILE
from spaceport.graphs.contract.signature import DTYPES, Signature
from spaceport.graphs.decoder import Decoder, DecoderWithLayerOutputs, attention_output_name, layer_output_name
from spaceport.kernels.native_library import library_path
from spaceport.runtime.backends.on_onnxruntime import options_for, session_of
from spaceport.runtime.backends.on_torch import TorchEngine
from spaceport.runtime.bundle import Bundle
from spaceport.verify.cases import Array, EngineLimits, RecordedCall

_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"

# Runs a recorded call; returns the graph outputs and marked values by name, as float32.
RunLayers = Callable[[RecordedCall], dict[str, Array]]


class ModelLayers:
    """The PyTorch model of a bundle."""

    def __init__(self, engine: TorchEngine, limits: EngineLimits) -> None:
        assert isinstance(engine.module, Decoder)
        self._marked = DecoderWithLayerOutputs(engine.module)
        self._names = [tensor.name for tensor in engine.signature.outputs]
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._engine = TorchEngine(self._forward, engine.signature, limits.capacity, limits.requests, engine.device)

    def run(self, call: RecordedCall) -> dict[str, Array]:
        call.run(self._engine)
        names = (*self._names, *self._marked.names)
        return {name: output.float().cpu().numpy() for name, output in zip(names, self._outputs, strict=True)}

    def _forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self._outputs = self._marked(*inputs)
        return self._outputs


class GraphLayers:
    """The graph of a bundle in an ONNX Runtime session that also outputs the marked values."""

    def __init__(self, bundle: Bundle, limits: EngineLimits, threads: int, cuda: bool) -> None:
        self.signature = bundle.manifest.signature
        graph = bundle.read(MODEL_FILE)
        model = onnx.load_model_from_string(graph)
        self.marks = show_marks(model, self.signature)
        float32_at_the_edges(model, self.signature)
        self._session = _session(model, bundle, threads, cuda)
        self.device = "cuda" if _CUDA in self._session.get_providers() else "cpu"
        sizes: dict[int | str, int] = {"B": limits.requests, "S": limits.capacity}
        self._kv: dict[str, Array] = {
            tensor.name: np.zeros(
                [sizes.get(size, size) for size in tensor.shape],  # type: ignore[arg-type]
                np.int8 if tensor.dtype == "int8" else np.float32,
            )
            for tensor in self.signature.past
        }

    def run(self, call: RecordedCall) -> dict[str, Array]:
        requests = slice(call.batch.first, call.batch.first + call.batch.requests)
        for first, moves in call.moves:
            for request, (sources, targets) in enumerate(moves, first):
                for buffer in self._kv.values():
                    buffer[request, :, targets] = buffer[request, :, sources]
        rows = dict(call.batch.arrays(self.signature))
        past = {name: buffer[requests] for name, buffer in self._kv.items()}
        names = [output.name for output in self._session.get_outputs()]
        outputs = dict(zip(names, self._session.run(names, rows | past), strict=True))
        for before, after in zip(self.signature.past, self.signature.present, strict=True):
            self._kv[before.name][requests] = outputs[after.name]
        return with_scales({name: np.asarray(output, np.float32) for name, output in outputs.items()}, self.signature)


def with_scales(outputs: dict[str, Array], signature: Signature) -> dict[str, Array]:
    """The outputs of a graph, with values that are numbers instead of 8-bit codes."""
    for layer in range(signature.layers if signature.kv_cache == "int8" else 0):
        scales = outputs[f"present.{layer}.scales"][:, signature.kv_heads :]  # those of keys come before them
        outputs[f"present.{layer}.value"] = outputs[f"present.{layer}.value"] * scales[..., None]
    return outputs


def show_marks(model: onnx.ModelProto, signature: Signature) -> tuple[str, ...]:
    """Add the marked values of a graph to its outputs, and return their names."""
    produced = {name for node in model.graph.node for name in node.output}
    layers = range(signature.layers)
    known = (name(layer) for layer in layers for name in (attention_output_name, layer_output_name))
    marks = tuple(mark for mark in known if mark in produced)
    kind = DTYPES[signature.dtype].onnx
    model.graph.output.extend(helper.make_tensor_value_info(mark, kind, None) for mark in marks)
    return marks


def float32_at_the_edges(model: onnx.ModelProto, signature: Signature) -> None:
    """Give a half-precision graph float32 inputs and outputs, which lose nothing: numpy has no bfloat16."""
    graph, half = model.graph, DTYPES[signature.dtype].onnx
    if half == TensorProto.FLOAT:
        return
    inputs = [value for value in graph.input if value.type.tensor_type.elem_type == half]
    outputs = [value for value in graph.output if value.type.tensor_type.elem_type == half]
    inner = {value.name: f"{value.name}/{signature.dtype}" for value in (*inputs, *outputs)}
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [inner.get(name, name) for name in names]
    into = [helper.make_node("Cast", [value.name], [inner[value.name]], to=half) for value in inputs]
    out = [helper.make_node("Cast", [inner[value.name]], [value.name], to=TensorProto.FLOAT) for value in outputs]
    nodes = [*into, *graph.node, *out]
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]  # it refers to the old names
    for value in (*inputs, *outputs):
        value.type.tensor_type.elem_type = TensorProto.FLOAT


def _session(model: onnx.ModelProto, bundle: Bundle, threads: int, cuda: bool) -> ort.InferenceSession:
    """A session of the changed graph, with the bundle's weights."""
    options = options_for(bundle, threads, library_path())
    usable = cuda and _CUDA in ort.get_available_providers()
    providers = [_CUDA, _CPU] if usable else [_CPU]
    try:
        return session_of(bundle, model.SerializeToString(), options, providers)
    except ort.capi.onnxruntime_pybind11_state.NotImplemented as error:
        raise MissingDependency(
            f"{bundle.path}: onnxruntime here does not run its graph ({error}), which --layers needs: leave --layers out, or run "
            "the check on a machine with onnxruntime-gpu and a GPU"
        ) from error


@dataclass(frozen=True)
class LayerValue:
    """A value of a graph that is compared."""

    name: str  # name in the graph
    layer: int | None  # None: after the last layer
    kind: str  # "keys", "values", "attention", "output" or "logits"

    def __str__(self) -> str:
        return self.kind if self.layer is None else f"layer {self.layer}, {self.kind}"


@dataclass(frozen=True)
class FirstMismatch:
    """The first value that is out of tolerance."""

    value: LayerValue
    case: str
    error: float
    allowed: float

    def __str__(self) -> str:
        layer = self.value.layer
        agreeing = {None: "all layers agree", 0: "nothing comes before it", 1: "layer 0 agrees"}
        before = agreeing.get(layer) or f"layers 0 to {(layer or 0) - 1} agree"
        return (
            f"first out of tolerance: {self.value} (max error {self.error:.2g}, {self.allowed:.2g} allowed), case "
            f"'{self.case}'; {before}"
        )


@dataclass(frozen=True)
class LayerComparison:
    """The result of comparing all intermediate values."""

    compared: str  # the two runs that were compared
    values: tuple[LayerValue, ...]
    first_mismatch: FirstMismatch | None
    closest: tuple[LayerValue, float]  # value closest to its tolerance, and its error relative to the tolerance

    def __str__(self) -> str:
        kinds = list(dict.fromkeys(value.kind for value in self.values if value.layer is not None))
        missing = "" if "output" in kinds else "; the graph has no marks for more: export it again"
        if self.first_mismatch is not None:
            return f"{self.first_mismatch}{missing}"
        value, share = self.closest
        layers = len({value.layer for value in self.values} - {None})
        return (
            f"all {layers} layers agree in {', '.join(kinds[:-1])} and {kinds[-1]} (at most {share:.2g} of the "
            f"tolerance: {value}){missing}"
        )

    def as_dict(self) -> dict[str, Any]:
        first = None
        if (mismatch := self.first_mismatch) is not None:
            error = None if np.isnan(mismatch.error) else mismatch.error
            first = {**asdict(mismatch.value), "case": mismatch.case, "allowed": mismatch.allowed, "error": error}
        return {
            "compared": self.compared,
            "values": [value.name for value in self.values],
            "first_mismatch": first,
            "summary": str(self),
        }


def layer_values(signature: Signature, marks: Sequence[str]) -> tuple[LayerValue, ...]:
    """The values that can be compared, in order of computation.

    Native operators scale keys before they are stored, and add what a layer's attention returns to its input."""
    values = []
    for layer in range(signature.layers):
        found = (
            LayerValue(f"present.{layer}.key", layer, "keys"),
            LayerValue(f"present.{layer}.value", layer, "values"),
            LayerValue(attention_output_name(layer), layer, "attention"),
            LayerValue(layer_output_name(layer), layer, "output"),
        )
        shared = found[1::2] if signature.kv_cache == "int8" else found
        values += [each for each in shared if each.kind in ("keys", "values") or each.name in marks]
    return (*values, LayerValue("logits", None, "logits"))


def compare_layers(
    model: RunLayers,
    graph: RunLayers,
    values: tuple[LayerValue, ...],
    calls: Sequence[RecordedCall],
    tolerance: float,
    compared: str,
) -> LayerComparison:
    """Run the calls on both, up to the first value that is out of tolerance."""
    closest = (values[-1], 0.0)
    for call in calls:
        for value, error, largest in _differences(model, graph, values, call):
            if not error <= tolerance * largest:  # also for NaN
                mismatch = FirstMismatch(value, call.case, error, tolerance * largest)
                return LayerComparison(compared, values, mismatch, closest)
            closest = max(closest, (value, error / (tolerance * largest) if error else 0.0), key=lambda pair: pair[1])
    return LayerComparison(compared, values, None, closest)


def _differences(
    model: RunLayers, graph: RunLayers, values: Sequence[LayerValue], call: RecordedCall
) -> Iterator[tuple[LayerValue, float, float]]:
    """Each value with its largest error and largest magnitude in one call."""
    expected, got = model(call), graph(call)
    visible = call.batch.attention_mask.shape[-1]
    for value in values:
        first, second = (_visible(outputs[value.name], value, visible) for outputs in (expected, got))
        # native operators have rows in one axis
        error = np.abs(first - second.reshape(first.shape)).max(initial=0.0)
        yield value, float(error), float(np.abs(first).max(initial=0.0))


def _visible(array: Array, value: LayerValue, visible: int) -> Array:
    """The array, of KV buffers only the slots that rows may see."""
    return array[:, :, :visible] if value.kind in ("keys", "values") else array
