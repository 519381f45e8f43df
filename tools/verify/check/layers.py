"""Layers: the first value inside a graph that is out of tolerance, found in the order in which it is reckoned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from spaceport.graphs.contract.signature import Signature
from spaceport.graphs.layer_outputs import attention_output_name, layer_output_name
from spaceport.tools.verify.accuracy import Array, Feed
from spaceport.tools.verify.check.inside import Inside


@dataclass(frozen=True)
class LayerValue:
    """A value of a graph that two runs are compared by."""

    name: str  # in the graph
    layer: int | None  # nothing: behind all layers
    told: str

    def __str__(self) -> str:
        return self.told if self.layer is None else f"layer {self.layer}, {self.told}"


@dataclass(frozen=True)
class Parted:
    """The first value that is out of tolerance."""

    part: LayerValue
    case: str
    error: float
    allowed: float

    def __str__(self) -> str:
        return (
            f"first out of tolerance: {self.part} (max error {self.error:.2g}, {self.allowed:.2g} allowed), case "
            f"'{self.case}'; {self._before()}"
        )

    def _before(self) -> str:
        if self.part.layer is None:
            return "all layers agree"
        return {0: "nothing comes before it", 1: "layer 0 agrees"}.get(
            self.part.layer, f"layers 0 to {self.part.layer - 1} agree"
        )


@dataclass(frozen=True)
class Layers:
    """What the comparison of all values found."""

    through: str  # which two runs were compared
    parts: tuple[LayerValue, ...]
    parted: Parted | None
    closest: tuple[LayerValue, float]  # the value with the largest share of its tolerance, if none is beyond it

    @property
    def layers(self) -> int:
        return len({part.layer for part in self.parts} - {None})

    def __str__(self) -> str:
        missing = "" if len(self.parts) == 4 * self.layers + 1 else "; the graph has no marks for more: export it again"
        if self.parted is not None:
            return f"{self.parted}{missing}"
        kinds = list(dict.fromkeys(part.told for part in self.parts if part.layer is not None))
        part, share = self.closest
        return (
            f"all {self.layers} layers agree in {', '.join(kinds[:-1])} and {kinds[-1]} (at most {share:.2g} of what is "
            f"allowed: {part}){missing}"
        )

    def as_dict(self) -> dict[str, Any]:
        parted = None
        if self.parted is not None:
            parted = {**asdict(self.parted.part), "case": self.parted.case, "allowed": self.parted.allowed}
            parted["error"] = None if np.isnan(self.parted.error) else self.parted.error
        return {
            "compared": self.through,
            "values": [part.name for part in self.parts],
            "first": parted,
            "told": str(self),
        }


def parts_of(signature: Signature, marks: Sequence[str]) -> tuple[LayerValue, ...]:
    """What can be compared, in the order in which a graph reckons it."""
    parts = []
    for layer in range(signature.layers):
        key, value = signature.present[2 * layer : 2 * layer + 2]
        parts += [LayerValue(key.name, layer, "keys"), LayerValue(value.name, layer, "values")]
        marked = ((attention_output_name(layer), "attention"), (layer_output_name(layer), "output"))
        parts += [LayerValue(name, layer, told) for name, told in marked if name in marks]
    return (*parts, LayerValue("logits", None, "logits"))


def compare_layers(
    model: Inside, graph: Inside, parts: tuple[LayerValue, ...], feeds: Sequence[Feed], tolerance: float, through: str
) -> Layers:
    """Run the feeds on both up to the first value that is out of tolerance."""
    closest = (parts[-1], 0.0)
    for feed in feeds:
        for part, error, allowed in _differences(model, graph, parts, feed):
            if not error <= tolerance * allowed:  # NaN is not
                parted = Parted(part, feed.case, error, tolerance * allowed)
                return Layers(through, parts, parted, closest)
            closest = max(closest, (part, error / (tolerance * allowed) if error else 0.0), key=lambda pair: pair[1])
    return Layers(through, parts, None, closest)


def _differences(
    model: Inside, graph: Inside, parts: Sequence[LayerValue], feed: Feed
) -> Iterator[tuple[LayerValue, float, float]]:
    """Each value's largest error and largest magnitude in one call."""
    expected, got = model.run(feed.arrays), graph.run(feed.arrays)
    visible = feed.arrays["attention_mask"].shape[-1]
    for part in parts:
        first, second = (_seen(outputs[part.name], part, visible) for outputs in (expected, got))
        error = np.abs(first - second).max(initial=0.0)
        yield part, float(error), float(np.abs(first).max(initial=0.0))


def _seen(value: Array, part: LayerValue, visible: int) -> Array:
    """Of a KV buffer the part that rows may see: what they wrote, and all that was there."""
    return value[:, :, :visible] if part.told in ("keys", "values") else value
