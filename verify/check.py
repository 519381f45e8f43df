"""Every engine that can run a bundle on the calls that the runtime makes, compared pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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
from spaceport.runtime.engine import PREFILL_ROWS, Engine, EngineFault, EngineOptions, capacity_for
from spaceport.verify.accuracy import (
    CallFailed,
    ComparedEngine,
    ComparedPair,
    LogitDifference,
    RunCall,
    compare,
    recorded_engine,
)
from spaceport.verify.cases import (
    DEFAULT_LONG,
    REQUESTS,
    SHORTEST,
    Array,
    Cases,
    CheckOptions,
    EngineLimits,
    Recording,
    record,
    replay,
)

if TYPE_CHECKING:
    from spaceport.verify.layers import LayerComparison
    from spaceport.verify.quantization import Agreement

_GENERATED = 64  # tokens that the cases generate after their longest prompt, at most


@dataclass(frozen=True)
class CheckedEngine:
    """An engine that can run the bundle."""

    name: str
    backend: str | None  # None: a reference, the PyTorch model or standard operators
    dtype: Precision
    open: Callable[[], Engine]
    native: bool = False
    experts: bool = False

    def compared(self, calls: int, on_progress: Callable[[str], None]) -> ComparedEngine:
        """The engine as a comparison opens, runs and closes it."""

        @contextmanager
        def open_replay() -> Iterator[RunCall]:
            on_progress(f"running them on {self.name}")
            with closing(self.open()) as engine:
                run, numbers = raising_call_failed(replay(engine)), count(1)

                def counted(arrays: Mapping[str, Array]) -> NDArray[np.float32]:
                    logits, done = run(arrays), next(numbers)
                    if reaches_quarter(done - 1, done, calls):
                        on_progress(f"compared {done} of {calls} calls")
                    return logits

                yield counted

        return ComparedEngine(self.name, self.dtype, open_replay, self.native, self.experts)


@dataclass(frozen=True)
class EngineSelection:
    """The engines that are compared, their shared limits, and the backends that cannot run here."""

    engines: tuple[CheckedEngine, ...]  # the cases are recorded on the first one
    limits: EngineLimits
    not_compared: Mapping[str, str]  # reason by backend
    cases: Cases

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(engine.backend for engine in self.engines if engine.backend is not None)


def select_engines(bundle: Bundle, options: CheckOptions) -> EngineSelection:
    """Everything that can run a bundle here: first the PyTorch model, or standard operators for a native bundle without
    checkpoint, then the backends."""
    if options.layers and options.checkpoint is None:
        raise OptionFault("--layers compares with the PyTorch model: expected a CHECKPOINT after the bundle")
    cases = _cases(bundle, options)
    length = SHORTEST if cases == "few" else options.length
    limits = limits_of(bundle.manifest, length, _largest(bundle, options))
    engine_options = EngineOptions(limits.capacity, limits.requests, options.threads, options.trust_engines)
    not_compared = {}
    for name in options.backends:
        if name not in BACKENDS:
            raise OptionFault(f"backend is {name!r}: expected {', '.join(BACKENDS)}")
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
    return EngineSelection(tuple(engines), limits, not_compared, cases)


def limits_of(manifest: Manifest, length_option: int | None, engines: Sequence[EngineRecord]) -> EngineLimits:
    """The longest prompt and the most requests and rows per call that all of these engines accept."""
    length = min(length_option or DEFAULT_LONG, manifest.max_positions)
    requests = min((REQUESTS, *(engine.requests for engine in engines)))
    rows = min((PREFILL_ROWS, *(engine.prefill_rows for engine in engines)))
    for engine in engines if length_option is None else ():
        while length > SHORTEST and capacity_for(manifest, length + _GENERATED) > engine.capacity:
            length -= 1
    return EngineLimits(length, capacity_for(manifest, length + _GENERATED), requests, rows)


def raising_call_failed(call: Callable[[Mapping[str, Array]], NDArray[np.float32]]) -> RunCall:
    """The same call, raising CallFailed for a fault of the engine."""

    def called(arrays: Mapping[str, Array]) -> NDArray[np.float32]:
        try:
            return call(arrays)
        except EngineFault as error:
            raise CallFailed(str(error)) from error

    return called


def _largest(bundle: Bundle, options: CheckOptions) -> list[EngineRecord]:
    """Of the engines built for this GPU and this graph, the one of each flavour with the largest capacity."""
    if no_gpu() is not None:
        return []
    flavours = {BACKENDS[name].flavour for name in options.backends or BACKENDS if name in BACKENDS} - {None}
    fitting = [
        record
        for record in bundle.manifest.engines.values()
        if record.graph == bundle.manifest.graph and record.target == gpu().target
    ]
    by_flavour = [[record for record in fitting if record.backend == flavour] for flavour in flavours]
    return [max(records, key=lambda record: (record.capacity, record.requests)) for records in by_flavour if records]


def _references(bundle: Bundle, options: CheckOptions, limits: EngineLimits) -> list[CheckedEngine]:
    if options.checkpoint is None:
        return []
    bundle_dtype = bundle.manifest.signature.dtype
    return [
        _reference(bundle, options, options.checkpoint, limits, dtype)
        for dtype in dict.fromkeys(("float32", bundle_dtype))
    ]


def _standard(bundle: Bundle, options: CheckOptions, engine_options: EngineOptions) -> list[CheckedEngine]:
    """The functions of a native graph, which ONNX Runtime runs where no library is registered."""
    manifest = bundle.manifest
    if options.checkpoint is not None or not manifest.native or library_path() is None:
        return []
    from spaceport.runtime.backends.on_onnxruntime import MOST_FOLDED, open_with_library

    if manifest.graph_bytes <= MOST_FOLDED:  # its threads would wait for each other longer than they work
        engine_options = replace(engine_options, threads=options.threads or 1)
    opened = partial(open_with_library, bundle, engine_options, None)
    name, dtype = f"standard operators {manifest.format}", manifest.signature.dtype
    return [CheckedEngine(name, None, dtype, opened, native=True, experts=has_experts(bundle))]


def _cases(bundle: Bundle, options: CheckOptions) -> Cases:
    """The cases to compare: few where standard operators unpack the weights of a large bundle in each call."""
    if options.checkpoint is not None or options.length is not None or not bundle.manifest.native:
        return options.cases
    from spaceport.runtime.backends.on_onnxruntime import MOST_FOLDED

    return "few" if bundle.manifest.graph_bytes > MOST_FOLDED else options.cases


def _reference(
    bundle: Bundle, options: CheckOptions, checkpoint: Path, limits: EngineLimits, dtype: Precision
) -> CheckedEngine:
    from spaceport.verify.reference import open_reference

    def opened() -> Engine:
        return open_reference(
            *(bundle, checkpoint, limits.capacity, limits.requests, dtype),
            *(options.remote_code, options.threads, options.adapter),
        )

    return CheckedEngine(f"PyTorch {dtype}", None, dtype, opened, bundle.manifest.native, has_experts(bundle))


def _backend(bundle: Bundle, name: str, engine_options: EngineOptions) -> CheckedEngine:
    manifest = bundle.manifest
    opened = partial(open_engine, bundle, name, engine_options)
    dtype, native = manifest.signature.dtype, manifest.native
    return CheckedEngine(f"{name} {manifest.format}", name, dtype, opened, native, has_experts(bundle))


def has_experts(bundle: Bundle) -> bool:
    """Whether the rows of a native graph choose experts: it has no other loops."""
    return bundle.manifest.native and "Loop" in operators(bundle.read(MODEL_FILE))


def _alone(bundle: Bundle, engines: list[CheckedEngine], not_compared: Mapping[str, str], options: CheckOptions) -> str:
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
    first, *others = selection.engines
    on_progress(f"recording the cases on {first.name}")
    with closing(first.open()) as engine:

        def on_case(done: int, total: int) -> None:
            if reaches_quarter(done - 1, done, total):
                on_progress(f"recorded {done} of {total} cases")

        recording = record(engine, bundle.manifest, selection.limits, options.seed, selection.cases, on_case)
    engines = [
        recorded_engine(first.name, first.dtype, recording.calls, first.native, first.experts),
        *(other.compared(len(recording.calls), on_progress) for other in others),
    ]
    pairs = compare(engines, recording.calls)
    layers = find_layer(bundle, options, selection, recording, pairs, on_progress) if options.layers else None
    quantization = None
    if options.checkpoint is not None:
        from spaceport.verify.quantization import measure_quantization

        quantization = measure_quantization(
            bundle, options.checkpoint, options.remote_code, options.seed, options.adapter
        )
    graph, calls, skipped = bundle.manifest.graph, len(recording.calls), tuple(recording.skipped)
    return CheckReport(
        graph,
        selection.backends,
        selection.cases != "all",
        calls,
        tuple(pairs),
        selection.not_compared,
        skipped,
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
    from spaceport.verify.reference import open_reference

    assert options.checkpoint is not None
    signature, limits = bundle.manifest.signature, selection.limits
    failed = next((difference.case for pair in pairs for difference in pair.differences if not difference.passed), None)
    calls = [call for call in recording.calls if failed in (None, call.case)]
    engine = open_reference(
        bundle,
        options.checkpoint,
        limits.capacity,
        limits.requests,
        signature.dtype,
        options.remote_code,
        options.threads,
        options.adapter,
    )
    graph = GraphLayers(bundle, limits, options.threads, any(BACKENDS[name].gpu for name in selection.backends))
    compared = f"PyTorch {signature.dtype} and the graph on onnxruntime {graph.device}"
    on_progress(f"comparing the layers of {compared}")
    values = layer_values(signature, graph.marks)
    tolerance = tolerance_of(signature.dtype, bundle.manifest.native)
    return compare_layers(ModelLayers(engine, limits).run, graph.run, values, calls, tolerance, compared)
