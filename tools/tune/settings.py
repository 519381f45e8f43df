"""Settings: everything that decides what a training does; a training that goes on must have the same ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import MAX_MASK_SLOTS

Objective = Literal["sar", "apar", "both"]
DEFAULT_CUTOFF = 2048  # or as many positions as a model has, where they are fewer

Method = Literal["full", "lora", "gated-lora", "embeddings"]


@dataclass(frozen=True)
class TrainingSettings:
    """How a checkpoint is tuned."""

    objective: Objective = "sar"
    method: Method = "full"
    # Drafting
    mask_slots: int = 5
    distinct: bool = False  # a mask token for each mask slot instead of one for all
    anchors: int = 32  # mask groups of a sample, redrawn in every epoch
    drop_rate: float = 0.0  # share of the groups that end before each mask slot beyond the first
    mask_weight: float = 1.0  # of the mask slots' mean loss, beside that of the tokens
    # Forking
    unforked_share: float | None = None  # share of the samples of an epoch that do not fork; nothing: as the data are
    whole_rate: float = 0.2  # share of the forked samples that are learned in one line, redrawn in every epoch
    # Texts
    cutoff: int = DEFAULT_CUTOFF  # tokens along a path
    # Steps
    epochs: float = 2.0
    max_steps: int | None = None
    batch: int = 32  # samples of a step
    micro_batch: int = 4  # samples that one process computes at once
    rate: float = 5e-5  # peak learning rate
    warmup: float = 0.03  # share of the steps
    weight_decay: float = 0.0
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    seed: int = 0
    # Low-rank adapters
    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()  # names of the adapted layers; nothing: all linear ones

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("mask-slots", self.mask_slots, 1, MAX_MASK_SLOTS),
            ("anchors", self.anchors, 1, None),
            ("drop-rate", self.drop_rate, 0, 1),
            ("mask-weight", self.mask_weight, 0, None),
            ("unforked-share", self.unforked_share, 0, 1),
            ("whole-rate", self.whole_rate, 0, 1),
            ("cutoff", self.cutoff, 8, None),
            ("max-steps", self.max_steps, 1, None),
            ("batch-size", self.batch, 1, None),
            ("micro-batch-size", self.micro_batch, 1, None),
            ("warmup", self.warmup, 0, 1),
            ("weight-decay", self.weight_decay, 0, None),
            ("seed", self.seed, 0, None),
            ("rank", self.rank, 1, None),
        ):
            if value is not None and not (value >= least and (most is None or value <= most)):
                limits = f"at least {least}" if most is None else f"{least} to {most}"
                raise OptionFault(f"--{name} is {value}: expected {limits}")
        for name, positive in (
            ("epochs", self.epochs),
            ("learning-rate", self.rate),
            ("clip", self.clip),
            ("alpha", self.alpha),
        ):
            if not 0 < positive < float("inf"):
                raise OptionFault(f"--{name} is {positive}: expected more than 0")
        if self.targets and self.method not in ("lora", "gated-lora"):
            raise OptionFault(
                f"--target {self.targets[0]} with --method {self.method}: it adds no adapters; expected --method lora or gated-lora"
            )
        if self.method == "gated-lora" and self.objective != "sar":
            raise OptionFault(
                f"--method gated-lora with --objective {self.objective}: it leaves the text as it is, so no [Fork] can be "
                "learned; expected --objective sar, or another method"
            )

    @property
    def drafts(self) -> bool:
        return self.objective in ("sar", "both")

    @property
    def forks(self) -> bool:
        return self.objective in ("apar", "both")

    @property
    def slots(self) -> int:
        """Mask slots that are trained."""
        return self.mask_slots if self.drafts else 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def differences(old: dict[str, Any], new: TrainingSettings) -> list[str]:
    """What a training that goes on was told otherwise than before, as `name: before, now`."""
    now = new.as_dict()
    listed = {name: list(value) if isinstance(value, tuple) else value for name, value in now.items()}
    return [
        f"{name}: {old.get(name)!r} before, {value!r} now" for name, value in listed.items() if old.get(name) != value
    ]
