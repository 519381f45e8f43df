"""Check: every engine of a bundle on the calls that the runtime makes, compared pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spaceport.graphs.contract.exactness import tolerance_of
from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.bundle import Bundle
from spaceport.tools.reference import open_reference
from spaceport.tools.verify.accuracy import ComparedPair, LogitDifference, compare, recorded_engine
from spaceport.tools.verify.check.cases import Recording, record
from spaceport.tools.verify.check.check_options import CheckOptions
from spaceport.tools.verify.check.engines import EngineSelection, select_engines
from spaceport.tools.verify.check.layer_runners import GraphLayers, ModelLayers
from spaceport.tools.verify.check.layers import LayerComparison, compare_layers, layer_values


@dataclass(frozen=True)
class CheckReport:
    """The result of a check."""

    graph: tuple[str, ...]  # sha256 of the graph's files
    backends: tuple[str, ...]  # backends that were compared
    calls: int  # recorded engine calls
    pairs: tuple[ComparedPair, ...]
    not_compared: Mapping[str, str]  # reason by backend
    skipped: tuple[str, ...]  # cases that were skipped, each with the reason
    layers: LayerComparison | None  # None unless requested

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
            "calls": self.calls,
            "cases": [difference.as_dict() for difference in self.differences],
            "pairs": [pair.as_dict() for pair in self.pairs],
            "not_compared": dict(self.not_compared),
            "skipped": list(self.skipped),
            "suspect": self.suspect,
            "layers": None if self.layers is None else self.layers.as_dict(),
        }


def check(bundle: Bundle, options: CheckOptions, on_progress: Callable[[str], None] = lambda _: None) -> CheckReport:
    """The comparison of all engines that can run a bundle here; they run one after the other on the same calls."""
    selection = select_engines(bundle, options)
    recording = record_on_first(bundle, selection, options.seed, on_progress)
    first, *others = selection.engines
    engines = [
        recorded_engine(first.name, first.dtype, recording.calls, first.activations),
        *(other.compared(on_progress) for other in others),
    ]
    pairs = compare(engines, recording.calls)
    layers = find_layer(bundle, options, selection, recording, pairs, on_progress) if options.layers else None
    graph, calls, skipped = bundle.manifest.graph, len(recording.calls), tuple(recording.skipped)
    return CheckReport(graph, selection.backends, calls, tuple(pairs), selection.not_compared, skipped, layers)


def record_on_first(
    bundle: Bundle, selection: EngineSelection, seed: int, on_progress: Callable[[str], None]
) -> Recording:
    """The calls of all cases, with the logits of the first engine."""
    first = selection.engines[0]
    on_progress(f"recording the cases on {first.name}")
    engine = first.open()
    try:
        return record(engine, bundle.manifest, selection.limits, seed)
    finally:
        engine.close()


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
    tolerance = tolerance_of(signature.dtype, bundle.manifest.activations)
    return compare_layers(ModelLayers(engine, limits), graph, values, calls, tolerance, compared)
