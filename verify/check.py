"""Every engine that can run a bundle on the calls that the runtime makes, compared pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from spaceport.graphs.contract.exactness import tolerance_of
from spaceport.graphs.contract.faults import MissingDependency, OptionFault
from spaceport.graphs.contract.manifest import MODEL_FILE, EngineRecord, Manifest
from spaceport.graphs.contract.progress import reaches_quarter
from spaceport.graphs.contract.signature import Precision
from spaceport.kernels.native_library import library_path
from spaceport.runtime.backends import BACKENDS, by_reason, open_engine, require, why_not
from spaceport.runtime.backends.graph_file import operators
from spaceport.runtime.backends.machine import gpu, no_gpu
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import PREFILL_ROWS, EngineOptions, capacity_for
from spaceport.verify.accuracy import ComparedEngine, ComparedPair, LogitDifference, compare
from spaceport.verify.cases import DEFAULT_LONG, REQUESTS, SHORTEST, CheckOptions, EngineLimits, Recording, record

if TYPE_CHECKING:
    from spaceport.runtime.backends.on_torch import TorchEngine
    from spaceport.verify.layers import LayerComparison
    from spaceport.verify.quantization import Agreement

_GENERATED = 64  # tokens that the cases generate after their longest prompt, at most


@dataclass(frozen=True)
class EngineSelection:
    """The engines that are compared, their shared limits, and the backends that cannot run here."""

    engines: tuple[ComparedEngine, ...]  # the cases are recorded on the first one
    limits: EngineLimits
    not_compared: Mapping[str, str]  # reason by backend
    few: bool  # whether only a few cases are compared

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(engine.backend for engine in self.engines if engine.backend is not None)


def select_engines(bundle: Bundle, options: CheckOptions) -> EngineSelection:
    """Everything that can run a bundle here: first the PyTorch model, or standard operators for a native bundle without
    checkpoint, then the backends."""
    if options.layers and options.checkpoint is None:
        raise OptionFault("--layers compares with the PyTorch model: expected a CHECKPOINT after the bundle")
    if options.length is not None and options.length > bundle.manifest.max_positions:
        raise OptionFault(
            f"--long-context is {options.length}: expected at most {bundle.manifest.max_positions}, the maximum of the model"
        )
    few = _only_few(bundle, options)
    length = SHORTEST if few else options.length
    limits = limits_of(bundle.manifest, length, _largest(bundle, options))
    engine_options = EngineOptions(limits.capacity, limits.requests, options.threads, options.trust_engines)
    not_compared = {}
    for name in options.backends:
        require(bundle, name, engine_options)
    if not options.backends:
        not_compared = {
            name: reason for name in BACKENDS if (reason := why_not(bundle, name, engine_options)) is not None
        }
    named = [name for name in options.backends or BACKENDS if name not in not_compared]
    if not named:
        raise MissingDependency(f"{bundle.path}: no backend runs it here: {'; '.join(by_reason(not_compared))}")
    engines = [
        *_references(bundle, options, limits),
        *_standard(bundle, options, engine_options),
        *(_backend(bundle, name, engine_options) for name in dict.fromkeys(named)),
    ]
    if len(engines) < 2:
        raise OptionFault(_alone(bundle, engines, not_compared, options))
    return EngineSelection(tuple(engines), limits, not_compared, few)


def limits_of(manifest: Manifest, length_option: int | None, engines: Sequence[EngineRecord]) -> EngineLimits:
    """The longest prompt and the most requests and rows per call that all of these engines accept."""
    length = min(length_option or DEFAULT_LONG, manifest.max_positions)
    requests = min((REQUESTS, *(engine.requests for engine in engines)))
    rows = min((PREFILL_ROWS, *(engine.prefill_rows for engine in engines)))
    for engine in engines if length_option is None else ():
        while length > SHORTEST and capacity_for(manifest, length + _GENERATED) > engine.capacity:
            length -= 1
    return EngineLimits(length, capacity_for(manifest, length + _GENERATED), requests, rows)


def _largest(bundle: Bundle, options: CheckOptions) -> list[EngineRecord]:
    """Of the engines built for this GPU and this graph, the one of each flavour with the largest capacity."""
    if no_gpu() is not None:
        return []
    flavours = {BACKENDS[name].flavour for name in options.backends or BACKENDS} - {None}
    fitting = [
        record
        for record in bundle.manifest.engines.values()
        if record.graph == bundle.manifest.graph and record.target == gpu().target
    ]
    by_flavour = [[record for record in fitting if record.backend == flavour] for flavour in flavours]
    return [max(records, key=lambda record: (record.capacity, record.requests)) for records in by_flavour if records]


def _references(bundle: Bundle, options: CheckOptions, limits: EngineLimits) -> list[ComparedEngine]:
    if options.checkpoint is None:
        return []
    return [
        ComparedEngine(f"PyTorch {dtype}", dtype, partial(_open_model, bundle, options, limits, dtype))
        for dtype in dict.fromkeys(("float32", bundle.manifest.signature.dtype))
    ]


def _open_model(bundle: Bundle, options: CheckOptions, limits: EngineLimits, dtype: Precision) -> TorchEngine:
    from spaceport.verify.reference import open_reference

    assert options.checkpoint is not None
    return open_reference(
        *(bundle, options.checkpoint, limits.capacity, limits.requests, dtype),
        *(options.trust_remote_code, options.threads, options.adapter),
    )


def _standard(bundle: Bundle, options: CheckOptions, engine_options: EngineOptions) -> list[ComparedEngine]:
    """The functions of a native graph, which ONNX Runtime runs where no library is registered."""
    manifest = bundle.manifest
    if options.checkpoint is not None or not manifest.native or library_path() is None:
        return []
    from spaceport.runtime.backends.on_onnxruntime import MOST_FOLDED, open_with_library

    if manifest.graph_bytes <= MOST_FOLDED:  # its threads would wait for each other longer than they work
        engine_options = replace(engine_options, threads=options.threads or 1)
    opened = partial(open_with_library, bundle, engine_options, None)
    return [ComparedEngine(f"standard operators {manifest.format}", manifest.signature.dtype, opened)]


def _only_few(bundle: Bundle, options: CheckOptions) -> bool:
    """Whether only a few cases are compared, as standard operators unpack the weights of a large bundle in each call."""
    if options.checkpoint is not None or options.length is not None or not bundle.manifest.native:
        return False
    from spaceport.runtime.backends.on_onnxruntime import MOST_FOLDED

    return bundle.manifest.graph_bytes > MOST_FOLDED


def _backend(bundle: Bundle, name: str, engine_options: EngineOptions) -> ComparedEngine:
    opened = partial(open_engine, bundle, name, engine_options)
    return ComparedEngine(f"{name} {bundle.manifest.format}", bundle.manifest.signature.dtype, opened, name)


def _has_experts(bundle: Bundle) -> bool:
    """Whether the rows of a native graph choose experts: it has no other loops."""
    return bundle.manifest.native and "Loop" in operators(bundle.read(MODEL_FILE))


def _alone(
    bundle: Bundle, engines: list[ComparedEngine], not_compared: Mapping[str, str], options: CheckOptions
) -> str:
    alternative = ", or leave --backend out" if options.backends else ""
    reasons = "".join(f"; not {line}" for line in by_reason(not_compared))
    if bundle.manifest.native and library_path() is None:
        reasons += "; not native operators: they were not compiled when Spaceport was installed"
    return (
        f"{bundle.path}: only {engines[0].name} runs it here, expected two engines to compare: name the CHECKPOINT that "
        f"it was exported from{alternative}{reasons}"
    )


@dataclass(frozen=True)
class CheckReport:
    """The result of a check."""

    graph: tuple[str, ...]  # sha256 of the graph's files
    backends: tuple[str, ...]  # backends that were compared
    quick: bool  # whether only a part of the cases were compared
    calls: int  # recorded engine calls
    pairs: tuple[ComparedPair, ...]
    not_compared: Mapping[str, str]  # reason by backend
    skipped: tuple[str, ...]  # cases that were skipped, each with the reason
    layers: LayerComparison | None  # None unless requested
    quantization: Agreement | None = None  # None: nothing is quantized, or there is no checkpoint

    @property
    def passed(self) -> bool:
        layers_agree = self.layers is None or self.layers.first_mismatch is None
        return layers_agree and all(pair.passed for pair in self.pairs)

    @property
    def suspect(self) -> str | None:
        """The engine that takes part in every failed pair; None if there is no single one."""
        failed = [{pair.first, pair.second} for pair in self.pairs if not pair.passed]
        shared = set.intersection(*failed) if failed else set()
        return shared.pop() if len(shared) == 1 else None

    @property
    def differences(self) -> tuple[LogitDifference, ...]:
        """The worst difference between the first engine and any other, by case."""
        own = [pair.differences for pair in self.pairs if pair.first == self.pairs[0].first]
        return tuple(
            max(differences, key=lambda difference: difference.excess) for differences in zip(*own, strict=True)
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "graph": list(self.graph),
            "backends": list(self.backends),
            "reference": self.pairs[0].first,
            "quick": self.quick,
            "calls": self.calls,
            "cases": [difference.as_dict() for difference in self.differences],
            "pairs": [pair.as_dict() for pair in self.pairs],
            "not_compared": dict(self.not_compared),
            "skipped": list(self.skipped),
            "suspect": self.suspect,
            "layers": None if self.layers is None else self.layers.as_dict(),
            "quantization": None if self.quantization is None else self.quantization.as_dict(),
        }


def check(bundle: Bundle, options: CheckOptions, on_progress: Callable[[str], None] = lambda _: None) -> CheckReport:
    """The comparison of all engines that can run a bundle here; they run one after the other on the same calls."""
    selection = select_engines(bundle, options)
    first = selection.engines[0]
    on_progress(f"recording the cases on {first.name}")
    with closing(first.open()) as engine:

        def on_case(done: int, total: int) -> None:
            if reaches_quarter(done - 1, done, total):
                on_progress(f"recorded {done} of {total} cases")

        recording = record(engine, bundle.manifest, selection.limits, options.seed, selection.few, on_case)
    native = bundle.manifest.native
    pairs = compare(selection.engines, recording.calls, native, _has_experts(bundle), on_progress)
    layers = find_layer(bundle, options, selection, recording, pairs, on_progress) if options.layers else None
    quantization = None
    if options.checkpoint is not None:
        from spaceport.verify.quantization import measure_quantization

        quantization = measure_quantization(
            bundle, options.checkpoint, options.trust_remote_code, options.seed, options.adapter
        )
    return CheckReport(
        bundle.manifest.graph,
        selection.backends,
        selection.few,
        len(recording.calls),
        tuple(pairs),
        selection.not_compared,
        tuple(recording.skipped),
        layers,
        quantization,
    )


def find_layer(
    bundle: Bundle,
    options: CheckOptions,
    selection: EngineSelection,
    recording: Recording,
    pairs: Sequence[ComparedPair],
    on_progress: Callable[[str], None],
) -> LayerComparison:
    """The graph's layers compared with the PyTorch model's, in the first failed case or, if none failed, in all cases.

    Engines show only their logits, so ONNX Runtime runs the graph that they were built from. Both run in the bundle's type.
    """
    from spaceport.verify.layers import GraphLayers, ModelLayers, compare_layers, layer_values

    signature, limits = bundle.manifest.signature, selection.limits
    failed = next((difference.case for pair in pairs for difference in pair.differences if not difference.passed), None)
    calls = [call for call in recording.calls if failed in (None, call.case)]
    engine = _open_model(bundle, options, limits, signature.dtype)
    graph = GraphLayers(bundle, limits, options.threads, any(BACKENDS[name].gpu for name in selection.backends))
    compared = f"PyTorch {signature.dtype} and the graph on onnxruntime {graph.device}"
    on_progress(f"comparing the layers of {compared}")
    values = layer_values(signature, graph.marks)
    tolerance = tolerance_of(signature.dtype, bundle.manifest.native)
    return compare_layers(ModelLayers(engine, limits).run, graph.run, values, calls, tolerance, compared)
