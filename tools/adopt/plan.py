"""Plan: the files and options that `spaceport adopt` was given, and what it makes of published weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spaceport.exporter.checkpoint_files import (
    CopiedEmbeddings,
    MaskEntry,
    ModelFiles,
    mask_entry,
    read_json,
    read_optional_json,
)
from spaceport.graphs.contract.faults import CheckpointError, OptionFault

if TYPE_CHECKING:  # torch is imported only once the paths are valid
    from spaceport.exporter.checkpoint import Checkpoint
    from spaceport.graphs.mechanism import Mechanism

PEFT_FILE = "adapter_config.json"
HEADS_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
INSIDE = "adapter"  # folder of an adapter that was published inside that of its checkpoint, as UNO's
# The methods that can be adopted, by their names for --method, in the order in which they are looked for.
TITLES = {
    "medusa": "Medusa: heads over the last hidden state",
    "pard": "PARD: one shared mask token",
    "uno": "UNO: LoRA that acts on random tokens only",
    "gated-lora": "LoRA of peft that acts on mask tokens only",
}
_USAGE = "expected CHECKPOINT [ADAPTER] TARGET"


@dataclass(frozen=True)
class AdoptionRequest:
    """Options that say what the files of an adapter do not."""

    method: str | None = None  # None: as the files show
    mask_tokens: tuple[str, ...] = ()  # by id or by text
    max_mask_slots: int | None = None
    noise_seed: int | None = None


@dataclass(frozen=True)
class Given:
    """The files of a checkpoint and of an adapter, with the options."""

    files: ModelFiles  # of the checkpoint
    adapter: Path | None
    training: Mapping[str, Any] = field(default_factory=dict)  # config.json beside the adapter, or one folder above
    request: AdoptionRequest = AdoptionRequest()

    @property
    def checkpoint(self) -> Path:
        return self.files.path

    @property
    def owner(self) -> Path:
        """The folder of the weights that draft: of the adapter, if there is one."""
        return self.adapter or self.checkpoint

    @property
    def config(self) -> Mapping[str, Any]:
        """The config.json that says how these weights draft."""
        return self.files.config if self.adapter is None else self.training

    @property
    def named_mask(self) -> MaskEntry | None:
        """The mask token in the configuration that the adapter was trained with, or in the checkpoint's."""
        for folder, config in ((self.owner, self.training), (self.checkpoint, self.files.config)):
            found = mask_entry(folder / "config.json", config)
            if found is not None:
                return found
        return None


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
    without_masks: str = ""  # why --mask-token has no effect; empty: it has one
    has_noise: bool = False  # whether --noise-seed has an effect


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


def arrange(paths: Sequence[Path]) -> tuple[Path, Path | None, Path | None]:
    """The given paths by what they are: CHECKPOINT, ADAPTER if there is one, and TARGET if it is given."""
    if not 1 <= len(paths) <= 3:
        raise OptionFault(f"{len(paths)} paths: {_USAGE}")
    checkpoint, *rest = paths
    adapter = None
    if len(rest) == 2 or (rest and published_weights(rest[0]) is not None):
        named = rest.pop(0)
        adapter = published_weights(named) or named
    if adapter is None:
        adapter = adapter_inside(checkpoint)
    _require_order(checkpoint)
    return checkpoint, adapter, rest[0] if rest else None


def published_weights(path: Path) -> Path | None:
    """The folder of an adapter of peft or of Medusa's heads, given by its path or that of a file in it; None: neither."""
    names = (PEFT_FILE, *HEADS_FILES)
    if path.is_file():
        return path.parent if path.name in names else None
    return path if any((path / name).exists() for name in names) else None


def adapter_inside(checkpoint: Path) -> Path | None:
    """The adapter that was published inside the folder of a checkpoint."""
    inside = checkpoint / INSIDE
    return inside if (inside / PEFT_FILE).exists() else None


def names_heads(files: ModelFiles) -> bool:
    """Whether the config.json of a checkpoint names heads of Medusa among its weights."""
    return bool(files.config.get("medusa_num_heads"))


def check_slots(slots: int, most: int) -> None:
    """Raise if an adapter cannot have this maximum number of mask slots."""
    if not 1 <= slots <= most:
        raise OptionFault(f"--max-mask-slots is {slots}: expected 1 to {most}")


def read_given(files: ModelFiles, adapter: Path | None, request: AdoptionRequest) -> Given:
    """What was given, with the config.json beside the adapter."""
    if adapter is None:
        return Given(files, adapter, {}, request)
    if not adapter.exists():
        raise CheckpointError(f"{adapter}: no such file or folder: {_USAGE}, with published weights as ADAPTER")
    beside = [folder / "config.json" for folder in (adapter, adapter.absolute().parent)]
    training = next((read_json(file) for file in beside if file.exists()), {})
    return Given(files, adapter, training, request)


def _require_order(checkpoint: Path) -> None:
    """Raise if the first path is an adapter without a base model."""
    heads = any((checkpoint / name).exists() for name in HEADS_FILES)
    file = checkpoint / ("config.json" if heads else PEFT_FILE)
    entries = read_optional_json(file)
    if entries and ((heads and "model_type" not in entries) or not (checkpoint / "config.json").exists()):
        base = entries.get("base_model_name_or_path")
        raise CheckpointError(
            f"{checkpoint}: is an adapter without its base model: {_USAGE}, with the folder of {base or 'its base model'} "
            "as CHECKPOINT"
        )
