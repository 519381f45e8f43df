"""Plan: what `spaceport adopt` found in published weights, and what it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from spaceport.exporter.checkpoint import Checkpoint
from spaceport.exporter.heads_file import HeadsConfig
from spaceport.exporter.sar_config import CheckpointError, DraftLayout
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.gated import Adapter
from spaceport.graphs.preloaded_slots import PreloadedSlots
from spaceport.tools.adopt.given import Given, refuse_noise_seed


@dataclass(frozen=True)
class LoraModule:
    """A low-rank adapter of one linear module, as its file has it."""

    rank: int
    scale: float  # of the product of B and A


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter folder of peft, checked against a base model's configuration."""

    folder: Path
    named_base: str | None  # base_model_name_or_path
    modules: Mapping[str, LoraModule]  # by name in the base model
    adapter: Adapter  # the same with one rank and one scale


@dataclass(frozen=True)
class PublishedHeads:
    """Published draft heads, checked against a base model's configuration."""

    files: Mapping[Path, Mapping[str, str]]  # names of the tensors to take over by their names in each file
    named_base: str | None  # base_model_name_or_path
    config: HeadsConfig  # that are taken over
    present: int  # heads in the files
    configured: int | None  # heads that config.json names


@dataclass(frozen=True)
class PublishedPrefix:
    """A published prefix of key/value pairs, checked against a base model's configuration."""

    file: Path
    shape: tuple[int, ...]  # of the keys and of the values: layers, heads, slots, head size
    tokens: int  # embeddings of mask tokens in the file
    unused: tuple[str, ...]  # names of further tensors, which the published code does not use
    read: Callable[[], tuple[PreloadedSlots, Tensor]]  # the slots, and the embeddings of mask tokens


@dataclass(frozen=True)
class Plan:
    """What was found, and what the written folder will say."""

    method: str
    evidence: str  # what shows the method
    checkpoint: Path
    mask_tokens: Mapping[str, int]  # ids by text, or by id for tokens without a text
    mask_slots: int
    layout: DraftLayout
    peft: PeftAdapter | None = None
    heads: PublishedHeads | None = None
    prefix: PublishedPrefix | None = None  # None like `peft` and `heads`: the checkpoint has all that is needed

    def as_dict(self) -> dict[str, Any]:
        adapter = None
        if self.peft is not None:
            one = self.peft.adapter
            adapter = {
                "folder": str(self.peft.folder),
                "named_base": self.peft.named_base,
                "modules": len(self.peft.modules),
                "rank": one.rank,
                "alpha": one.alpha,
                "targets": list(one.targets),
                "scales": sorted({module.scale for module in self.peft.modules.values()}),
            }
        return {
            "method": self.method,
            "evidence": self.evidence,
            "checkpoint": str(self.checkpoint),
            "mask_tokens": dict(self.mask_tokens),
            "mask_slots": self.mask_slots,
            **asdict(self.layout),
            "adapter": adapter,
            "heads": None if self.heads is None else _heads(self.heads),
            "prefix": None if self.prefix is None else _prefix(self.prefix),
        }


def require_no_masks(given: Given, checkpoint: Checkpoint, reason: str) -> None:
    """Raise for mask tokens or noise that were asked for, or a base model with mask tokens: the method has its own drafts."""
    if given.request.mask_tokens:
        raise OptionFault(f"--mask-token has no effect: {reason}; leave it out")
    refuse_noise_seed(given.request)
    if checkpoint.tokens.mask:
        raise CheckpointError(
            f"{given.checkpoint}: has mask tokens, which draft already: expected a base model without them"
        )


@dataclass(frozen=True)
class Method:
    """A way to publish weights that draft for themselves."""

    name: str  # for --method
    title: str
    recognize: Callable[[Given], str | None]  # what shows it; None: the files are of another method
    plan: Callable[[Given, str, Checkpoint], Plan]
    write: Callable[[Plan, Checkpoint, Path], None] | None  # None: there is nothing to write
    expected: str | None = None  # what shows it, in words; None: a mask token or noise


def _prefix(prefix: PublishedPrefix) -> dict[str, Any]:
    return {"file": str(prefix.file), "slots": prefix.shape[2], "tokens": prefix.tokens, "unused": list(prefix.unused)}


def _heads(heads: PublishedHeads) -> dict[str, Any]:
    return {
        "files": [str(file) for file in heads.files],
        "named_base": heads.named_base,
        "count": heads.config.count,
        "blocks": heads.config.blocks,
        "present": heads.present,
        "configured": heads.configured,
    }
