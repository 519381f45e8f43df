"""Plan: what `spaceport adopt` found in published weights, and what it writes."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import AddedToken
from torch import Tensor

from spaceport.exporter.checkpoint import Checkpoint
from spaceport.exporter.sar_config import CheckpointError, CopiedEmbeddings
from spaceport.graphs.contract.draft_methods import CAUSAL, MaskLayout
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.mechanism import Mechanism
from spaceport.tools.adopt.given import TITLES, Given, refuse_noise_seed

_COPY = "copy the file again"


def read_torch_file(file: Path) -> dict[str, Tensor]:
    """The tensors by name in a file that holds nothing else."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise CheckpointError(
            f"{file}: cannot be read as tensors: {reason}: expected what torch.save writes for a dictionary of tensors; {_COPY}"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise CheckpointError(f"{file}: holds {type(content).__name__}: expected a dictionary of tensors; {_COPY}")
    return cast(dict[str, Tensor], content)


@dataclass(frozen=True)
class PublishedWeights:
    """Published weights, checked against a base model's configuration."""

    kind: Literal["adapter", "heads"]
    path: Path  # of their file or folder
    sizes: Mechanism  # what they become, without values
    report: Mapping[str, Any]
    read: Callable[[], Mechanism]  # what they become


@dataclass(frozen=True)
class Method:
    """A way to publish weights that draft for themselves."""

    name: str  # for --method
    recognize: Callable[[Given], str | None]  # what shows it; None: the files are of another method
    plan: Callable[[Given, str, Checkpoint], AdoptionPlan]
    expected: str | None = None  # what shows it, in words; None: a mask token or noise
    writes: bool = True  # whether there is something to write besides the checkpoint


@dataclass(frozen=True)
class AdoptionPlan:
    """What was found, and what the written folder will say."""

    method: Method
    evidence: str  # what shows the method
    checkpoint: Checkpoint
    mask_tokens: Mapping[str, int]  # ids by text, or by id for tokens without a text
    mask_slots: int
    weights: PublishedWeights | None  # None: the checkpoint has all that is needed
    layout: MaskLayout = CAUSAL
    noise: CopiedEmbeddings | None = None

    @property
    def title(self) -> str:
        return TITLES[self.method.name]

    def as_dict(self) -> dict[str, Any]:
        reports: dict[str, Any] = {"adapter": None, "heads": None}
        if self.weights is not None:
            reports[self.weights.kind] = dict(self.weights.report)
        return {
            "title": self.title,
            "method": self.method.name,
            "evidence": self.evidence,
            "checkpoint": str(self.checkpoint.folder),
            "mask_tokens": dict(self.mask_tokens),
            "mask_slots": self.mask_slots,
            **asdict(self.layout),
            "noise": None if self.noise is None else asdict(self.noise),
            **reports,
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


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's tensors by name; of a safetensors file, only the header is read."""
    if file.suffix == ".pt":
        return {name: tuple(tensor.shape) for name, tensor in read_torch_file(file).items()}
    try:
        with safe_open(file, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}: {_COPY}") from error


def new_tokens(given: Given, tokenizer: Any, kind: str, count: int) -> dict[str, int]:
    """The ids that the tokenizer gives to new tokens of a kind, one for each mask slot."""
    texts = [f"<|{kind}_{slot}|>" for slot in range(1, count + 1)]
    backend = tokenizer.backend_tokenizer
    if any(backend.token_to_id(text) is not None for text in texts):
        raise CheckpointError(
            f"{given.checkpoint}: its tokenizer has the token {texts[0]} already: expected a base model without adopted {kind}"
        )
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    return {text: int(backend.token_to_id(text)) for text in texts}
