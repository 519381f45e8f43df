"""Plan: what `spaceport adopt` found in published weights, and what it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from spaceport.exporter.checkpoint import Checkpoint
from spaceport.exporter.checkpoint_files import CopiedEmbeddings
from spaceport.graphs.contract.faults import CheckpointError
from spaceport.graphs.mechanism import Mechanism
from spaceport.tools.adopt.given import TITLES, Given


@dataclass(frozen=True)
class PublishedWeights:
    """Published weights, checked against a base model's configuration."""

    kind: Literal["adapter", "heads"]
    path: Path  # of their file or folder
    report: Mapping[str, Any]
    read: Callable[[], Mechanism]  # what they become


@dataclass(frozen=True)
class Method:
    """A way to publish weights that draft for themselves."""

    name: str  # for --method
    recognize: Callable[[Given], str | None]  # what shows it; None: the files are of another method
    plan: Callable[[Given, str, Checkpoint], AdoptionPlan]


@dataclass(frozen=True)
class AdoptionPlan:
    """What was found, and what the written folder will say."""

    method: str
    evidence: str  # what shows the method
    checkpoint: Checkpoint
    mask_tokens: Mapping[str, int]  # ids by text, or by id for tokens without a text
    mask_slots: int
    weights: PublishedWeights | None  # None: the checkpoint has all that is needed
    noise: CopiedEmbeddings | None = None

    def as_dict(self) -> dict[str, Any]:
        reports: dict[str, Any] = {"adapter": None, "heads": None}
        if self.weights is not None:
            reports[self.weights.kind] = dict(self.weights.report)
        return {
            "title": TITLES[self.method],
            "method": self.method,
            "evidence": self.evidence,
            "checkpoint": str(self.checkpoint.folder),
            "mask_tokens": dict(self.mask_tokens),
            "mask_slots": self.mask_slots,
            "noise": None if self.noise is None else asdict(self.noise),
            **reports,
        }


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a safetensors file by name; only its header is read."""
    try:
        with safe_open(file, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}: copy the file again") from error
