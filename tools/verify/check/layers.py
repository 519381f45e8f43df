"""Layers: the first intermediate value of a graph that is out of tolerance, in order of computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from spaceport.graphs.contract.signature import Signature
from spaceport.graphs.decoder import attention_output_name, layer_output_name
from spaceport.tools.verify.accuracy import Array, RecordedCall
from spaceport.tools.verify.check.layer_runners import LayerRunner


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
        return (
            f"first out of tolerance: {self.value} (max error {self.error:.2g}, {self.allowed:.2g} allowed), case "
            f"'{self.case}'; {self._before()}"
        )

    def _before(self) -> str:
        if self.value.layer is None:
            return "all layers agree"
        return {0: "nothing comes before it", 1: "layer 0 agrees"}.get(
            self.value.layer, f"layers 0 to {self.value.layer - 1} agree"
        )


@dataclass(frozen=True)
class LayerComparison:
    """The result of comparing all intermediate values."""

    compared: str  # the two runs that were compared
    values: tuple[LayerValue, ...]
    first_mismatch: FirstMismatch | None
    closest: tuple[LayerValue, float]  # value closest to its tolerance, and its error relative to the tolerance

    @property
    def layers(self) -> int:
        return len({value.layer for value in self.values} - {None})

    def __str__(self) -> str:
        missing = (
            "" if len(self.values) == 4 * self.layers + 1 else "; the graph has no marks for more: export it again"
        )
        if self.first_mismatch is not None:
            return f"{self.first_mismatch}{missing}"
        kinds = list(dict.fromkeys(value.kind for value in self.values if value.layer is not None))
        value, share = self.closest
        return (
            f"all {self.layers} layers agree in {', '.join(kinds[:-1])} and {kinds[-1]} (at most {share:.2g} of the "
            f"tolerance: {value}){missing}"
        )

    def as_dict(self) -> dict[str, Any]:
        first = None
        if (mismatch := self.first_mismatch) is not None:
            first = {**asdict(mismatch.value), "case": mismatch.case, "allowed": mismatch.allowed}
            first["error"] = None if np.isnan(mismatch.error) else mismatch.error
        return {
            "compared": self.compared,
            "values": [value.name for value in self.values],
            "first_mismatch": first,
            "summary": str(self),
        }


def layer_values(signature: Signature, marks: Sequence[str]) -> tuple[LayerValue, ...]:
    """The values that can be compared, in order of computation."""
    values = []
    for layer in range(signature.layers):
        key, value = signature.present[2 * layer : 2 * layer + 2]
        values += [LayerValue(key.name, layer, "keys"), LayerValue(value.name, layer, "values")]
        marked = ((attention_output_name(layer), "attention"), (layer_output_name(layer), "output"))
        values += [LayerValue(name, layer, kind) for name, kind in marked if name in marks]
    return (*values, LayerValue("logits", None, "logits"))


def compare_layers(
    model: LayerRunner,
    graph: LayerRunner,
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
    model: LayerRunner, graph: LayerRunner, values: Sequence[LayerValue], call: RecordedCall
) -> Iterator[tuple[LayerValue, float, float]]:
    """Each value with its largest error and largest magnitude in one call."""
    expected, got = model.run(call.arrays), graph.run(call.arrays)
    visible = call.arrays["attention_mask"].shape[-1]
    for value in values:
        first, second = (_visible(outputs[value.name], value, visible) for outputs in (expected, got))
        error = np.abs(first - second).max(initial=0.0)
        yield value, float(error), float(np.abs(first).max(initial=0.0))


def _visible(array: Array, value: LayerValue, visible: int) -> Array:
    """The array, of KV buffers only the slots that rows may see."""
    return array[:, :, :visible] if value.kind in ("keys", "values") else array
