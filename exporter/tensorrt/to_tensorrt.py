"""Build an engine from an append graph with TensorRT or TensorRT-RTX, which builds without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx

from spaceport.exporter.interrupts import interrupts_recorded
from spaceport.exporter.tensorrt.append_graph import attention_nodes, decompose_attention, softcap_of
from spaceport.graphs.contract.faults import InputFault, MissingDependency, OptionFault
from spaceport.graphs.contract.installation import install_command
from spaceport.graphs.contract.manifest import FLAVOURS, LIBRARIES, MODEL_FILE, Flavour
from spaceport.graphs.contract.signature import STEP_ROWS, VISIBLE_STEP, Signature, logit_rows, visible_length

MAX_REQUESTS = 1024

# dimension -> minimum, optimum, maximum
Profile = dict[str, tuple[int, int, int]]
# Called with the completed fraction of a build (0 to 1) and the name of the current phase.
OnProgress = Callable[[float, str], None]

_FUSED_TYPES = ("float16", "bfloat16")
_FUSED_HEADS = range(16, 257, 8)  # head sizes with fused attention, measured with TensorRT-RTX 1.7
_HEAD_MULTIPLE = 8  # half-precision attention with other head sizes has to be decomposed in the graph
_OTHER = "; TensorRT itself builds for the GPU that it runs on (--backend tensorrt)"
_WARNING = 2  # ILogger.Severity: 0 internal error, 1 error, 2 warning, 3 info, 4 verbose
_ACTIVATION = re.compile(r"Total Activation Memory: (\d+) bytes")


@dataclass(frozen=True)
class Shapes:
    """The maximum sizes of an engine's calls."""

    capacity: int  # KV slots per request, a multiple of VISIBLE_STEP
    requests: int
    step_rows: int  # maximum rows per request in decode steps, for which CUDA graphs are captured
    prompt_rows: int  # maximum rows per request in any call

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= MAX_REQUESTS:
            raise OptionFault(f"--max-requests is {self.requests}: expected 1 to {MAX_REQUESTS}")
        if not STEP_ROWS <= self.prompt_rows <= self.capacity:
            raise OptionFault(
                f"--prefill-rows is {self.prompt_rows}: expected {STEP_ROWS}, the maximum of a decode step, to "
                f"{self.capacity}, the KV slots per request; raise --max-seq-len for more"
            )
        if not 1 <= self.step_rows <= self.prompt_rows:
            raise OptionFault(
                f"--max-step-rows is {self.step_rows}: expected 1 to {self.prompt_rows}, the value of --prefill-rows"
            )


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
        """GPU architectures that this library can build for anywhere; empty: only for the machine's GPU."""
        if self.flavour == "tensorrt":
            return ()
        known = [name for name in self.module.ComputeCapability.__members__ if name.startswith("SM")]
        return tuple(sorted((name.lower() for name in known), key=lambda name: int(name[2:])))


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build."""

    target: str  # such as sm89
    shapes: Shapes
    workspace: int | None = None  # maximum workspace memory of the engine in bytes; None: all GPU memory
    mask_slots: int = 0  # maximum mask slots; the decode profile is tuned for them
    timing_cache: Path | None = None  # read before the build, written after it


@dataclass(frozen=True)
class AttentionPlan:
    """How attention runs in an engine."""

    decomposed: int  # layers whose attention runs as matmuls
    reason: str  # why; empty if all layers are fused
    in_graph: bool = False  # decomposed in the graph, because TensorRT does not accept the operator at all


@dataclass(frozen=True)
class BuiltEngine:
    """A finished engine in memory."""

    plan: memoryview
    attention: AttentionPlan
    activation: int  # activation memory in bytes


@dataclass
class BuildMessages:
    """Messages of the builder: errors and warnings in order, and the activation memory from its info messages."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    activation: int = 0  # activation memory in bytes, the maximum over all profiles

    def add(self, severity: int, text: str) -> None:
        if severity <= _WARNING:
            (self.warnings if severity == _WARNING else self.errors).append(text)
        elif match := _ACTIVATION.search(text):
            self.activation = max(self.activation, int(match[1]))


@dataclass
class BuildProgress:
    """Progress over nested build phases; the completed fraction never decreases. Also cancels a build."""

    on_progress: OnProgress
    is_cancelled: Callable[[], bool]
    done: float = 0.0
    fault: BaseException | None = None  # raised by `on_progress`; to be raised again after the builder returned
    _phases: list[list[Any]] = field(default_factory=list)  # name, completed steps, total steps

    def begin(self, name: str, parent: str | None, steps: int) -> None:
        self._phases.append([name, 0, max(1, steps)])
        self._report()

    def step(self, name: str, step: int) -> bool:
        for phase in self._phases:
            if phase[0] == name:
                phase[1] = step + 1
        self._report()
        return self.fault is None and not self.is_cancelled()

    def end(self, name: str) -> None:
        self._phases = [phase for phase in self._phases if phase[0] != name]

    def _report(self) -> None:
        share, done = 1.0, 0.0
        for _, steps, total in self._phases:
            done += share * min(steps, total) / total
            share /= total
        self.done = max(self.done, min(done, 1.0))
        try:
            self.on_progress(self.done, self._phases[0 if len(self._phases) < 2 else 1][0])
        except BaseException as error:  # noqa: BLE001  (an exception in a C++ callback would end the process)
            self.fault = error


@cache
def logger_of(library: Any) -> Any:
    """The logger of a library, which adds to its `messages`; the library keeps the address of its first logger."""

    class Log(library.ILogger):  # type: ignore[misc]
        messages = BuildMessages()

        def log(self, severity: Any, text: str) -> None:
            self.messages.add(int(severity), text)

    return Log()


def monitor_of(library: Any, progress: BuildProgress) -> Any:
    """A progress monitor of this library that updates `progress`."""

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        phase_start = staticmethod(progress.begin)
        step_complete = staticmethod(progress.step)
        phase_finish = staticmethod(progress.end)

    return Monitor()


class _NoKernel(InputFault):
    """TensorRT has no fused kernel for the attention."""


def profiles(shapes: Shapes, row_logits: int, mask_slots: int, heads: int = 0) -> tuple[Profile, Profile]:
    """The decode profile and the prefill profile of an engine.

    They are tuned for one request, where latency matters most: for its largest draft, and for a full prefill chunk. Kernels
    for one request are not slow for four. The tuned visible length is half of the capacity.
    """
    requests = (1, 1, shapes.requests)
    visible = (VISIBLE_STEP, visible_length(shapes.capacity // 2), shapes.capacity)
    drafted = (mask_slots + 1) ** 2 + heads  # the root and each candidate, with its mask slots if it has no heads
    drafted = min(drafted, shapes.step_rows)
    most = logit_rows(shapes.prompt_rows, row_logits)
    rows = (1, drafted, shapes.step_rows)
    return (
        {"B": requests, "T": rows, "R": rows, "A": visible},
        {"B": requests, "T": (1, shapes.prompt_rows, shapes.prompt_rows), "R": (1, 1, most), "A": visible},
    )


def open_library(flavour: Flavour | None = None) -> Library:
    """The library of this flavour; without a flavour, the first that is installed."""
    missing = []
    for name in (flavour,) if flavour else FLAVOURS:
        try:
            return Library(name, import_module(LIBRARIES[name]))
        except ImportError as error:
            missing.append(f"{LIBRARIES[name]} does not import ({error}): {install_command(name)}")
    raise MissingDependency(f"building engines needs TensorRT; {'; or '.join(missing)}")


def target_of(library: Library, requested: str, here: str | None, why_none: str) -> str:
    """The requested target, with "current" resolved to this machine's GPU `here`; `why_none`: why it has none."""
    choices = f"expected {', '.join(library.targets)}" if library.targets else "it builds for the GPU of the machine"
    if requested == "current" and here is None:
        raise OptionFault(f"--target current: {why_none}; {choices}")
    target = here if requested == "current" else requested
    if target in library.targets or (not library.targets and target is not None and target == here):
        return target
    if requested == "current":
        raise OptionFault(
            f"--target current: this GPU is {here}, for which {library.name} has no kernels; {choices}{_OTHER}"
        )
    other = _OTHER if library.targets else ""
    raise OptionFault(f"--target is {requested}: {library.name} cannot build for it; {choices}, or current{other}")


def attention_of(model: onnx.ModelProto, signature: Signature) -> AttentionPlan:
    """How attention runs, decided by the graph's type, head size and softcap."""
    nodes, layers = attention_nodes(model), signature.layers
    if any(softcap_of(node) for node in nodes):
        return AttentionPlan(layers, "TensorRT has no fused kernel with softcap", in_graph=True)
    if len(nodes) < layers:
        return AttentionPlan(layers, "the bundle was exported with --attention plain")
    if signature.dtype not in _FUSED_TYPES:
        return AttentionPlan(layers, f"TensorRT has no fused kernel for {signature.dtype}")
    if signature.head_dim not in _FUSED_HEADS:
        reason = f"TensorRT has no fused kernel for heads of {signature.head_dim}"
        return AttentionPlan(layers, reason, in_graph=signature.head_dim % _HEAD_MULTIPLE != 0)
    return AttentionPlan(0, "")


def build(
    library: Library,
    model: onnx.ModelProto,
    folder: Path,
    signature: Signature,
    options: BuildOptions,
    on_progress: OnProgress = lambda done, phase: None,
) -> BuiltEngine:
    """The engine of an append graph with its weights in `folder`; the graph is changed in place where necessary."""
    attention = attention_of(model, signature)
    if attention.in_graph:
        decompose_attention(model, signature)
    try:
        return _built(library, model, folder, signature, options, attention, on_progress)
    except _NoKernel:  # `attention_of` knows the kernels of one version only
        every = AttentionPlan(signature.layers, f"{library.name} has no fused kernel for it")
        return _built(library, model, folder, signature, options, every, on_progress)


def _built(
    library: Library,
    model: onnx.ModelProto,
    folder: Path,
    signature: Signature,
    options: BuildOptions,
    attention: AttentionPlan,
    on_progress: OnProgress,
) -> BuiltEngine:
    trt = library.module
    logger = logger_of(trt)  # must outlive the builder, like the monitor
    messages = logger.messages = BuildMessages()
    builder = trt.Builder(logger)
    network = _parsed(library, builder, logger, model, folder / MODEL_FILE)
    _check_kv_updates(library, network, signature)
    if attention.decomposed and not attention.in_graph:
        _decompose(library, network)
    config = _config(library, builder, options)
    shapes = profiles(options.shapes, signature.row_logits, options.mask_slots, signature.lines - 1)
    _add_profiles(library, builder, config, network, shapes)
    cache = read_cache(config, messages, options.timing_cache) if options.timing_cache else None
    with interrupts_recorded() as interrupts:
        progress = BuildProgress(on_progress, lambda: bool(interrupts))
        monitor = config.progress_monitor = monitor_of(library.module, progress)
        plan = builder.build_serialized_network(network, config)
        del monitor
    if progress.fault is not None:
        raise progress.fault
    if plan is None:
        raise build_fault(library, options, messages)
    if options.timing_cache and cache is not None:
        options.timing_cache.write_bytes(cache.serialize())
    return BuiltEngine(memoryview(plan), attention, messages.activation)


def _parsed(library: Library, builder: Any, logger: Any, model: onnx.ModelProto, path: Path) -> Any:
    trt = library.module
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(model.SerializeToString(), str(path)):  # the parser finds the weights by this path
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        details = "; ".join(dict.fromkeys(f"{e.node_name()} ({e.node_operator()}): {e.desc().strip()}" for e in errors))
        raise InputFault(
            f"{path}: {library.name} cannot parse {details or 'the graph'}: expected supported nodes; export it again "
            "with --lowering append --attention plain, or update TensorRT"
        )
    return network


def _check_kv_updates(library: Library, network: Any, signature: Signature) -> None:
    """Raise unless TensorRT updates each KV buffer in place."""
    kind = library.module.LayerType.KV_CACHE_UPDATE
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    updates = {layer.get_output(0).name: layer.get_input(0).name for layer in layers if layer.type == kind}
    for past, present in zip(signature.past, signature.present, strict=True):
        if updates.get(present.name) != past.name:
            raise InputFault(
                f"{library.name} does not write {present.name} to the memory of {past.name}: expected a KV cache update; "
                "export it again with --lowering append"
            )


def _decompose(library: Library, network: Any) -> None:
    trt = library.module
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # get_layer returns the base class
            layer.attention.decomposable = True


def _config(library: Library, builder: Any, options: BuildOptions) -> Any:
    trt, config = library.module, builder.create_builder_config()
    if library.flavour == "tensorrt-rtx":
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.__members__[options.target.upper()], 0)
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # the runtime allocates memory, as CUDA graphs need it
    config.clear_flag(trt.BuilderFlag.TF32)  # on by default: float32 matmuls would have 10-bit mantissas
    if options.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace)
    return config


def _add_profiles(library: Library, builder: Any, config: Any, network: Any, all_profiles: Sequence[Profile]) -> None:
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    for ranges in all_profiles:
        profile = builder.create_optimization_profile()
        for tensor in inputs:
            names = [tensor.get_dimension_name(axis) for axis in range(len(tensor.shape))]
            sizes = list(zip(tensor.shape, names, strict=True))
            shapes = [[ranges[name][end] if size == -1 else size for size, name in sizes] for end in range(3)]
            profile.set_shape(tensor.name, *shapes)
        if config.add_optimization_profile(profile) < 0:
            raise InputFault(
                f"{library.name} does not take the profile {ranges}: expected shapes that the graph allows"
            )


def read_cache(config: Any, messages: BuildMessages, file: Path) -> Any:
    """The timing cache of earlier builds, to which the build adds; empty if the file does not exist."""
    before = len(messages.errors) + len(messages.warnings)
    cache = config.create_timing_cache(file.read_bytes() if file.exists() else b"")
    reported = len(messages.errors) + len(messages.warnings) > before
    if cache is None or reported or not config.set_timing_cache(cache, False):
        raise InputFault(
            f"{file}: not a timing cache of this TensorRT and GPU: expected one that a build on this machine wrote; choose another "
            "file name to start a new one"
        )
    return cache


def build_fault(library: Library, options: BuildOptions, messages: BuildMessages) -> InputFault | OptionFault:
    """The error to raise for the builder's error messages."""
    text = " ".join(" ".join(messages.errors).split())
    if "is_decomposable" in text:
        return _NoKernel(text)
    if "workspace" in text:
        if options.workspace is None:
            needed = f"has not enough workspace memory: lower --prefill-rows or --max-requests: {text[:300]}"
            return OptionFault(f"{library.name} {needed}")
        return OptionFault(
            f"--workspace is {options.workspace / 2**20:.0f} MB: {library.name} needs more; raise it, or leave it "
            "out to allow all GPU memory"
        )
    if "HW-specific datatypes" in text:
        return OptionFault(
            f"--target is {options.target}: that GPU does not support a type in the bundle's graph; expected a newer target, or "
            "a bundle that was exported with --format float16"
        )
    return InputFault(
        f"{library.name} could not build for {options.target}: {text[:600] or 'no error message'}: expected a graph that "
        "it has kernels for; try --attention plain at the export, another target or another version"
    )
