"""Check: every engine of a bundle on the runtime's own calls, compared pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spaceport.graphs.contract.tolerance import tolerance_of
from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.bundle import Bundle
from spaceport.tools.reference import open_reference
from spaceport.tools.verify.accuracy import ComparedPair, LogitDifference, compare, recorded
from spaceport.tools.verify.check.cases import Recording, record
from spaceport.tools.verify.check.inside import GraphInside, ModelInside
from spaceport.tools.verify.check.layers import Layers, compare_layers, parts_of
from spaceport.tools.verify.check.lineup import CheckOptions, Lineup, line_up


@dataclass(frozen=True)
class CheckReport:
    """What a check found."""

    graph: tuple[str, ...]  # sha256 of its files
    backends: tuple[str, ...]  # that were compared
    calls: int
    pairs: tuple[ComparedPair, ...]
    absent: Mapping[str, str]  # by backend: why it was not compared
    left_out: tuple[str, ...]  # what no case shows, and why
    layers: Layers | None  # if it was asked for

    @property
    def passed(self) -> bool:
        return all(pair.passed for pair in self.pairs)

    @property
    def suspect(self) -> str | None:
        """The one side that takes part in every pair that failed."""
        failed = [{pair.first, pair.second} for pair in self.pairs if not pair.passed]
        shared = set.intersection(*failed) if failed else set()
        return shared.pop() if len(shared) == 1 else None

    @property
    def differences(self) -> tuple[LogitDifference, ...]:
        """For each case the worst that was found of the first side and any other."""
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
            "not_compared": dict(self.absent),
            "left_out": list(self.left_out),
            "suspect": self.suspect,
            "layers": None if self.layers is None else self.layers.as_dict(),
        }


def check(bundle: Bundle, options: CheckOptions, stage: Callable[[str], None] = lambda name: None) -> CheckReport:
    """All engines that can run a bundle here, one after the other on the same calls, and each pair compared."""
    lineup = line_up(bundle, options)
    recording = recorded_on_first(bundle, lineup, options.seed, stage)
    first, *others = lineup.contenders
    sides = [
        recorded(first.name, first.dtype, recording.feeds, first.activations),
        *(other.side(stage) for other in others),
    ]
    pairs = compare(sides, recording.feeds)
    layers = layers_of(bundle, options, lineup, recording, pairs, stage) if options.layers else None
    graph, calls, left_out = bundle.manifest.graph, len(recording.feeds), tuple(recording.left_out)
    return CheckReport(graph, lineup.backends, calls, tuple(pairs), lineup.absent, left_out, layers)


def recorded_on_first(bundle: Bundle, lineup: Lineup, seed: int, stage: Callable[[str], None]) -> Recording:
    """The calls of all cases, and what the first of the lineup made of them."""
    first = lineup.contenders[0]
    stage(f"recording the cases on {first.name}")
    engine = first.open()
    try:
        return record(engine, bundle.manifest, lineup.room, seed)
    finally:
        engine.close()


def layers_of(
    bundle: Bundle,
    options: CheckOptions,
    lineup: Lineup,
    recording: Recording,
    pairs: Sequence[ComparedPair],
    stage: Callable[[str], None],
) -> Layers:
    """The graph's values against the model's, both in the bundle's type: in the first case that failed, or in all.

    Of engines nothing is seen but their logits, so onnxruntime runs the graph that they were built from.
    """
    assert options.checkpoint is not None
    signature, room = bundle.manifest.signature, lineup.room
    failed = next((difference.case for pair in pairs for difference in pair.differences if not difference.passed), None)
    feeds = [feed for feed in recording.feeds if failed in (None, feed.case)]
    engine = open_reference(
        bundle, options.checkpoint, room.capacity, room.requests, signature.dtype, options.remote_code, options.threads
    )
    graph = GraphInside(bundle, room, options.threads, any(BACKENDS[name].gpu for name in lineup.backends))
    through = f"PyTorch {signature.dtype} and the graph on onnxruntime {graph.device}"
    stage(f"comparing the layers of {through}")
    parts = parts_of(signature, graph.marks)
    tolerance = tolerance_of(signature.dtype, bundle.manifest.activations)
    return compare_layers(ModelInside(engine, room), graph, parts, feeds, tolerance, through)
