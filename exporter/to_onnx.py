"""Trace a decoder module and write it as model.onnx, and the graph that selects tokens of its logits."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch._dynamo import config as dynamo

from spaceport.exporter.graph_passes import (
    WeightNotFound,
    fix_reshapes,
    read_lazily,
    simplify,
    store_native_products,
    store_quantized_weights,
)
from spaceport.exporter.tensorrt.append_graph import contract_mismatch
from spaceport.graphs.attention import hooked
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import DATA_FILE, MODEL_FILE
from spaceport.graphs.contract.progress import reaches_quarter
from spaceport.graphs.contract.signature import BEST_TOKENS, Lowering, Signature, selection_width
from spaceport.graphs.decoder import Decoder, DecoderWithLayerOutputs
from spaceport.graphs.traits import decoder_layers
from spaceport.kernels.functions import add_functions

# Called with the name of each stage when it begins.
OnStage = Callable[[str], None]

# The lowest opset that has the operators, so that more versions of ONNX Runtime load the graph; append needs
# TensorScatter.
OPSETS: dict[Lowering, int] = {"scatter": 23, "append": 24}

_IR_VERSION = 11
_SELECTION_OPSET, _SELECTION_IR_VERSION = 18, 9
# Sizes while tracing: all different, none 1, since a dimension of 1 would become static.
_TRACED = {"B": 2, "T": 3, "R": 2, "A": 64, "S": 128}
# Lines of torch's exporter that begin a stage after tracing, and their stages
_TORCH_STAGES = {
    "Run decompositions...": "breaking operators down into those of ONNX",
    "Translate the graph into ONNX...": "translating the graph to ONNX",
}
_MUCH_DATA = 100_000_000  # bytes of weights from which on their writing is reported


class UntraceableModel(InputFault):
    """A model could not be traced into a graph; the message states where it failed."""


def to_onnx(decoder: Decoder, folder: Path, on_stage: OnStage = lambda name: None, native: str | None = None) -> None:
    """Write model.onnx and its data file into `folder`, checked against the decoder's signature.

    With a `native` format, native operators compute the products of linear modules."""
    signature = decoder.signature
    model = trace(decoder, on_stage)
    _strip_metadata(model)
    _cast_norm_inputs(model)
    if decoder.quantization.quantized_weights:
        on_stage(f"storing the {decoder.quantization.weights} weights in the graph")
    try:
        if native is not None:
            store_native_products(model, decoder.model, native)
        store_quantized_weights(model, decoder.quantization)
    except WeightNotFound as error:
        raise UntraceableModel(
            f"{_family(decoder)} cannot be stored with quantized weights: {error}: export it unquantized "
            "(--format float16)"
        ) from error
    if signature.lowering == "scatter":
        fix_reshapes(model)
    model.graph.sort()
    model.opset_imports[""] = OPSETS[signature.lowering]
    model.ir_version = _IR_VERSION
    path = folder / MODEL_FILE
    _save(model, path, on_stage)
    if native is not None:
        written = onnx.load(str(path), load_external_data=False)
        add_functions(written)
        path.write_bytes(written.SerializeToString())
    check_written(folder, signature, _family(decoder), on_stage)


def check_written(folder: Path, signature: Signature, family: str, on_stage: OnStage) -> None:
    """Raise unless the graph in a folder is valid and has the inputs and outputs of a signature."""
    path = folder / MODEL_FILE
    on_stage("checking the graph")
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise UntraceableModel(f"{family} was written as a graph that onnx rejects: {_reason(error)}") from error
    if mismatch := contract_mismatch(onnx.load(str(path), load_external_data=False).graph, signature):
        kind, got, expected = mismatch
        raise UntraceableModel(f"the written graph has the {kind} {got}: expected {expected}")


def _save(model: ir.Model, path: Path, on_stage: OnStage) -> None:
    total = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    written = 0

    def report(tensor: ir.TensorProtocol, info: object) -> None:
        nonlocal written
        if total >= _MUCH_DATA and reaches_quarter(written, written + tensor.nbytes, total):
            on_stage(f"wrote {(written + tensor.nbytes) / 1e6:.0f} of {total / 1e6:.0f} MB")
        written += tensor.nbytes

    on_stage(f"writing the graph and its weights, {total / 1e6:.1f} MB")
    ir.save(model, path, external_data=DATA_FILE, callback=report)


def trace(decoder: Decoder, on_stage: OnStage = lambda name: None) -> ir.Model:
    """The decoder as an ONNX graph at opset 23, where norms and rotary embeddings are single operators."""
    signature, module = decoder.signature, DecoderWithLayerOutputs(decoder)
    names = [tensor.name for tensor in signature.inputs]
    shapes = tuple(
        {axis: torch.export.Dim.DYNAMIC for axis, size in enumerate(tensor.shape) if isinstance(size, str)}
        for tensor in signature.inputs
    )
    inputs = traced_inputs(signature, next(decoder.parameters()).device)
    with torch.no_grad():
        module(*inputs)
    layer_outputs = module.names  # read before tracing: names that are set while tracing are lost
    on_stage("tracing the graph")
    try:
        # fake tensors: computing the keys of their cache takes longer than it saves
        with _quiet(on_stage), _layers_reported(decoder, on_stage), dynamo.patch(fake_tensor_cache_enabled=False):
            program = torch.onnx.export(
                module,
                inputs,
                dynamo=True,
                opset_version=23,
                input_names=names,
                output_names=[tensor.name for tensor in signature.outputs],
                dynamic_shapes=(shapes,),
                verbose=True,  # its lines are read by `_quiet`
                optimize=False,  # done by `simplify`
            )
    except (torch.onnx.OnnxExporterError, RuntimeError, TypeError, NotImplementedError) as error:
        raise UntraceableModel(f"{_family(decoder)} could not be traced into a graph: {_reason(error)}") from error
    assert program is not None
    on_stage("simplifying the graph")
    read_lazily(program.model, decoder.parameters())
    simplify(program.model)
    _name_layer_outputs(program.model, len(signature.outputs), layer_outputs)
    _name_dimensions(program.model, signature)
    return program.model


def traced_inputs(signature: Signature, device: torch.device) -> tuple[Tensor, ...]:
    """Inputs for tracing with the shapes of the signature; their values do not matter."""
    made = []
    for tensor in signature.inputs:
        shape = [_TRACED[size] if isinstance(size, str) else size for size in tensor.shape]
        fill = torch.ones if tensor.dtype == "bool" else torch.zeros
        made.append(fill(shape, dtype=getattr(torch, tensor.dtype), device=device))
    return tuple(made)


def _name_layer_outputs(model: ir.Model, outputs: int, names: Sequence[str]) -> None:
    """Name the layer outputs, which follow the outputs of the signature, and remove them from the graph's outputs."""
    for value, name in zip(model.graph.outputs[outputs:], names, strict=True):
        value.name = name
    del model.graph.outputs[outputs:]


def _strip_metadata(model: ir.Model) -> None:
    """Remove the tracer's metadata about source lines: it is larger than a small graph and contains local paths."""
    graph = model.graph
    values = (*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs))
    model.metadata_props.clear()
    for part in (graph, *graph, *values):
        part.metadata_props.clear()
        part.doc_string = None


def _cast_norm_inputs(model: ir.Model) -> None:
    """Cast the input of each fused norm to the type of its scale.

    For half-precision models whose norms compute in float32, the fusion creates norms with two types, which onnx
    rejects."""
    for node in list(model.graph):
        if node.op_type != "RMSNormalization":
            continue
        states, scale = node.inputs[:2]
        if states is not None and scale is not None and scale.dtype is not None and states.dtype != scale.dtype:
            cast = ir.node("Cast", [states], {"to": scale.dtype})
            model.graph.insert_before(node, cast)
            node.replace_input_with(0, cast.outputs[0])


def _family(decoder: Decoder) -> str:
    return type(decoder.model).__name__


def _name_dimensions(model: ir.Model, signature: Signature) -> None:
    for values, tensors in ((model.graph.inputs, signature.inputs), (model.graph.outputs, signature.outputs)):
        for value, tensor in zip(values, tensors, strict=True):
            fixed = [isinstance(size, int) for size in value.shape or ()]
            if fixed != [isinstance(size, int) for size in tensor.shape]:
                raise UntraceableModel(f"{tensor.name} was traced with shape {value.shape}: expected {tensor.shape}")
            value.shape = ir.Shape(tensor.shape)


def _reason(error: BaseException) -> str:
    """The innermost cause in one line; torch's exporter wraps it in long advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _layers_reported(decoder: Decoder, on_stage: OnStage) -> Iterator[None]:
    """Report each quarter of the decoder layers that the tracer has passed inside the block."""
    layers = decoder_layers(decoder.model, decoder.signature.layers)

    def report(module: nn.Module, *_: object) -> None:
        done = layers.index(module) + 1
        if not torch.compiler.is_dynamo_compiling() and reaches_quarter(done - 1, done, len(layers)):
            on_stage(f"traced {done} of {len(layers)} layers")

    with hooked([layer.register_forward_hook(report) for layer in layers]):
        yield


class _TorchLines(io.StringIO):
    """Standard output of torch's exporter, of which only the beginning of stages is reported."""

    def __init__(self, on_stage: OnStage) -> None:
        super().__init__()
        self._on_stage = on_stage

    def write(self, text: str) -> int:
        if (stage := _TORCH_STAGES.get(text)) is not None:
            self._on_stage(stage)
        return len(text)


@contextlib.contextmanager
def _quiet(on_stage: OnStage) -> Iterator[None]:
    """Silence torch's exporter inside the block, apart from its stages; errors are still raised."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(_TorchLines(on_stage)):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def write_selection(file: Path, vocab_size: int) -> None:
    """Write a graph from logits, B x R x V, to the selection of each row, B x R x (2n + 1), in float32.

    A selection has the n highest logits, their token ids, and the log-sum-exp of all logits. It is a separate graph: as
    an output of the model's graph, ONNX Runtime would compute it in every call.
    """
    count = min(BEST_TOKENS, vocab_size)
    constants = [
        helper.make_tensor("count", TensorProto.INT64, [1], [count]),
        helper.make_tensor("zero", TensorProto.INT64, [1], [0]),
        helper.make_tensor("one", TensorProto.INT64, [1], [1]),
        helper.make_tensor("last", TensorProto.INT64, [1], [-1]),
    ]
    nodes = [
        helper.make_node("TopK", ["logits", "count"], ["scores", "ids"], axis=-1, largest=1, sorted=1),
        helper.make_node("Cast", ["ids"], ["tokens"], to=TensorProto.FLOAT),  # exact below 2^24
        helper.make_node("Slice", ["scores", "zero", "one", "last"], ["peak"]),
        helper.make_node("Sub", ["logits", "peak"], ["below"]),
        helper.make_node("Exp", ["below"], ["weights"]),
        helper.make_node("ReduceSum", ["weights", "last"], ["sum"], keepdims=1),
        helper.make_node("Log", ["sum"], ["log"]),
        helper.make_node("Add", ["log", "peak"], ["total"]),
        helper.make_node("Concat", ["scores", "tokens", "total"], ["selection"], axis=-1),
    ]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "R", vocab_size])
    selection = helper.make_tensor_value_info("selection", TensorProto.FLOAT, ["B", "R", selection_width(vocab_size)])
    graph = helper.make_graph(nodes, "selection", [logits], [selection], constants)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", _SELECTION_OPSET)], ir_version=_SELECTION_IR_VERSION
    )
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, file)
