"""TensorRT: an append graph as an engine, by TensorRT or by TensorRT-RTX, which also builds where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx

from spaceport.exporter.interrupts import interrupts_recorded
from spaceport.exporter.tensorrt.append_graph import UnbuildableGraph
from spaceport.exporter.tensorrt.builder_monitor import BuildMessages, BuildProgress, OnProgress, logger_of, monitor_of
from spaceport.exporter.tensorrt.decomposed_attention import attention_nodes, decompose_attention, softcap_of
from spaceport.exporter.tensorrt.profiles import Profile, Shapes, profiles
from spaceport.graphs.contract.faults import InputFault, MissingDependency, OptionFault
from spaceport.graphs.contract.manifest import FLAVOURS, LIBRARIES, MODEL_FILE, Flavour
from spaceport.graphs.contract.signature import Signature

_FUSED_TYPES = ("float16", "bfloat16")
_FUSED_HEADS = range(16, 257, 8)  # measured with TensorRT-RTX 1.7: head sizes that fused attention takes
_STEP_OF_HALF = 8  # half-precision attention of head sizes between these has to be written out in the graph


class BuildFault(InputFault):
    """TensorRT could not make an engine of a graph; the message says what it said."""


@dataclass(frozen=True)
class Library:
    """TensorRT or TensorRT-RTX, imported."""

    flavour: Flavour
    module: Any

    @property
    def version(self) -> str:
        return str(self.module.__version__)

    @property
    def name(self) -> str:
        return f"{self.flavour} {self.version}"

    @property
    def targets(self) -> tuple[str, ...]:
        """What this library builds for wherever it runs; for anything else it needs the GPU itself."""
        if self.flavour == "tensorrt":
            return ()
        known = [name for name in self.module.ComputeCapability.__members__ if name.startswith("SM")]
        return tuple(sorted((name.lower() for name in known), key=lambda name: int(name[2:])))


@dataclass(frozen=True)
class BuildOptions:
    """How an engine is built."""

    target: str  # such as sm89
    shapes: Shapes
    workspace: int | None = None  # bytes that the builder may let the engine scratch in; nothing: all there is
    refittable: bool = False
    mask_slots: int = 0  # of a draft; steps are tuned to it
    timing_cache: Path | None = None  # read before and written after


@dataclass(frozen=True)
class Attention:
    """How the layers' attention runs."""

    decomposed: int  # layers as matrix products
    reason: str  # for that; empty: all layers are fused
    written_out: bool = False  # in the graph, where TensorRT cannot take the operator at all


@dataclass(frozen=True)
class Built:
    """A finished engine, still in memory."""

    plan: memoryview
    attention: Attention
    activation: int  # bytes that running it takes beside weights and buffers


def open_library(flavour: Flavour | None = None) -> Library:
    """The library that builds this flavour; without one the first that is installed."""
    missing = []
    for name in (flavour,) if flavour else FLAVOURS:
        try:
            return Library(name, import_module(LIBRARIES[name]))
        except ImportError as error:
            missing.append(f"{LIBRARIES[name]} does not import ({error}): pip install 'spaceport[{name}]'")
    raise MissingDependency(f"building engines needs TensorRT; {'; or '.join(missing)}")


_OTHER = "; TensorRT itself builds for the GPU that it runs on (--flavour tensorrt)"


def target_of(library: Library, asked: str, here: str | None, why_none: str) -> str:
    """What `asked` names as a target that this library can build for on a machine whose GPU is `here`."""
    without = f"expected {', '.join(library.targets)}" if library.targets else "it builds for the GPU of the machine"
    if asked == "current" and here is None:
        raise OptionFault(f"--target current: {why_none}; {without}")
    target = here if asked == "current" else asked
    if target in library.targets or (not library.targets and target is not None and target == here):
        return target
    if asked == "current":
        raise OptionFault(
            f"--target current: this GPU is {here}, for which {library.name} has no kernels; {without}{_OTHER}"
        )
    other = _OTHER if library.targets else ""
    raise OptionFault(f"--target is {asked}: {library.name} does not build for it here; {without}, or current{other}")


def attention_of(model: onnx.ModelProto, signature: Signature) -> Attention:
    """How attention can run, decided from the graph: the type, the size of a head, a limit of scores."""
    nodes, layers = attention_nodes(model), signature.layers
    if any(softcap_of(node) for node in nodes):
        return Attention(layers, "TensorRT has no fused kernel with softcap", written_out=True)
    if len(nodes) < layers:
        return Attention(layers, "the bundle was exported with --attention plain")
    if signature.dtype not in _FUSED_TYPES:
        return Attention(layers, f"TensorRT has no fused kernel for {signature.dtype}")
    if signature.head_dim not in _FUSED_HEADS:
        reason = f"TensorRT has no fused kernel for heads of {signature.head_dim}"
        return Attention(layers, reason, written_out=signature.head_dim % _STEP_OF_HALF != 0)
    return Attention(0, "")


def build(
    library: Library,
    model: onnx.ModelProto,
    folder: Path,
    signature: Signature,
    recipe: BuildOptions,
    hear: OnProgress = lambda done, phase: None,
) -> Built:
    """The engine of an append graph whose weights lie in `folder`; the graph is changed where it must be."""
    attention = attention_of(model, signature)
    if attention.written_out:
        decompose_attention(model, signature)
    try:
        return _built(library, model, folder, signature, recipe, attention, hear)
    except _NoKernel:  # the facts above are those of one version
        every = Attention(signature.layers, f"{library.name} has no fused kernel for it")
        return _built(library, model, folder, signature, recipe, every, hear)


class _NoKernel(BuildFault):
    """Fused attention was asked for and is not there."""


def _built(
    library: Library,
    model: onnx.ModelProto,
    folder: Path,
    signature: Signature,
    recipe: BuildOptions,
    attention: Attention,
    hear: OnProgress,
) -> Built:
    said, trt = BuildMessages(), library.module
    logger = logger_of(library.module, said)  # it and the monitor have to outlive the builder
    builder = trt.Builder(logger)
    network = _parsed(library, builder, logger, model, folder / MODEL_FILE)
    _hold_in_place(library, network, signature)
    if attention.decomposed and not attention.written_out:
        _decompose(library, network)
    config = _config(library, builder, recipe)
    _add_profiles(library, builder, config, network, profiles(recipe.shapes, signature.vocab_size, recipe.mask_slots))
    cache = read_cache(config, said, recipe.timing_cache) if recipe.timing_cache else None
    with interrupts_recorded() as interrupts:
        advance = BuildProgress(hear, lambda: bool(interrupts))
        monitor = config.progress_monitor = monitor_of(library.module, advance)
        plan = builder.build_serialized_network(network, config)
        del monitor
    if advance.fault is not None:
        raise advance.fault
    if plan is None:
        raise build_fault(library, recipe, said)
    if recipe.timing_cache and cache is not None:
        recipe.timing_cache.write_bytes(cache.serialize())
    return Built(memoryview(plan), attention, said.activation)


def _parsed(library: Library, builder: Any, logger: Any, model: onnx.ModelProto, path: Path) -> Any:
    trt = library.module
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(model.SerializeToString(), str(path)):  # the path leads it to the weights
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        told = "; ".join(dict.fromkeys(f"{e.node_name()} ({e.node_operator()}): {e.desc().strip()}" for e in errors))
        raise UnbuildableGraph(
            f"{path}: {library.name} cannot take {told or 'the graph'}: expected nodes that it knows; export it again "
            "with --lowering append --attention plain, or update TensorRT"
        )
    return network


def _hold_in_place(library: Library, network: Any, signature: Signature) -> None:
    """Raise unless TensorRT itself updates each buffer where it lies."""
    kind = library.module.LayerType.KV_CACHE_UPDATE
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    updates = {layer.get_output(0).name: layer.get_input(0).name for layer in layers if layer.type == kind}
    for past, present in zip(signature.past, signature.present, strict=True):
        if updates.get(present.name) != past.name:
            raise UnbuildableGraph(
                f"{library.name} does not write {present.name} to the memory of {past.name}: expected a KV cache update; "
                "export it again with --lowering append"
            )


def _decompose(library: Library, network: Any) -> None:
    trt = library.module
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # what get_layer should have returned
            layer.attention.decomposable = True


def _config(library: Library, builder: Any, recipe: BuildOptions) -> Any:
    trt, config = library.module, builder.create_builder_config()
    if library.flavour == "tensorrt-rtx":
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.__members__[recipe.target.upper()], 0)
        config.set_flag(
            trt.BuilderFlag.REQUIRE_USER_ALLOCATION
        )  # what it runs in is given to it, so it can be captured
    config.clear_flag(trt.BuilderFlag.TF32)  # on by default: float32 would be multiplied with ten bits
    if recipe.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, recipe.workspace)
    if recipe.refittable:
        config.set_flag(trt.BuilderFlag.REFIT)
    return config


def _add_profiles(library: Library, builder: Any, config: Any, network: Any, steps: Sequence[Profile]) -> None:
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    for step in steps:
        profile = builder.create_optimization_profile()
        for tensor in inputs:
            names = [tensor.get_dimension_name(axis) for axis in range(len(tensor.shape))]
            sizes = list(zip(tensor.shape, names, strict=True))
            shapes = [[step[name][end] if size == -1 else size for size, name in sizes] for end in range(3)]
            profile.set_shape(tensor.name, *shapes)
        if config.add_optimization_profile(profile) < 0:
            raise BuildFault(f"{library.name} does not take the profile {step}: expected shapes that the graph allows")


def read_cache(config: Any, said: BuildMessages, file: Path) -> Any:
    """The timings of earlier builds, to be added to; a file that is not there yet begins empty."""
    content = file.read_bytes() if file.exists() else b""
    before = len(said.errors) + len(said.warnings)
    cache = config.create_timing_cache(content)
    if cache is None or len(said.errors) + len(said.warnings) > before or not config.set_timing_cache(cache, False):
        raise InputFault(
            f"{file}: not a timing cache of this TensorRT and GPU: expected one that a build here wrote; choose another "
            "file name to begin a new one"
        )
    return cache


def build_fault(library: Library, recipe: BuildOptions, said: BuildMessages) -> InputFault | OptionFault:
    """What the builder's last words come to."""
    words = " ".join(" ".join(said.errors).split())
    for sign, fault in _FAULTS:
        if sign in words:
            return fault(library, recipe, words)
    return BuildFault(
        f"{library.name} could not build for {recipe.target}: {words[:600] or 'it says no reason'}: expected a graph that "
        "it has kernels for; try --attention plain at the export, another target or another version"
    )


def _workspace(library: Library, recipe: BuildOptions, words: str) -> OptionFault:
    if recipe.workspace is None:
        return OptionFault(
            f"{library.name} has not enough memory to scratch in: lower --prompt-rows or --max-requests: {words[:300]}"
        )
    return OptionFault(
        f"--workspace is {recipe.workspace / 2**20:.0f} MB: {library.name} needs more for some step; raise it, or leave it "
        "out for all that the GPU has"
    )


def _no_type(library: Library, recipe: BuildOptions, words: str) -> OptionFault:
    return OptionFault(
        f"--target is {recipe.target}: that GPU lacks a type that is in the bundle's graph; expected a newer target, or a "
        "bundle that was exported with --dtype float16 and without --weights float8"
    )


_FAULTS: tuple[tuple[str, Callable[[Library, BuildOptions, str], InputFault | OptionFault]], ...] = (
    ("is_decomposable", lambda library, recipe, words: _NoKernel(words)),
    ("workspace", _workspace),
    ("HW-specific datatypes", _no_type),
)
