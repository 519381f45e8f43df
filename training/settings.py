"""Settings: the hyperparameters of a training; a resumed training must have the same ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from spaceport.exporter.checkpoint_files import SarConfig
from spaceport.graphs.contract.draft_methods import CAUSAL, MAX_MASK_SLOTS, Group, MaskLayout
from spaceport.graphs.contract.faults import OptionFault

Objective = Literal["sar", "apar", "both"]
MAX_CORRECTION_RANK = 512
DEFAULT_MASK_SLOTS = 5
DEFAULT_PHRASES = 65_536
DEFAULT_CUTOFF = 2048  # tokens; lower for a model with fewer positions

Method = Literal["full", "lora", "gated-lora", "embeddings"]


@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters of a training."""

    objective: Objective = "sar"
    method: Method = "full"
    # Draft training
    mask_slots: int | None = None  # None: as in the checkpoint, else DEFAULT_MASK_SLOTS
    distinct: bool = False  # one mask token per mask row of a group instead of one shared mask token
    shift: bool | None = None  # whether mask rows predict the token after their position; None: as in the checkpoint
    group: Group | None = None  # the mask rows that a mask row sees; None: as in the checkpoint
    anchors: int = 32  # mask groups per sample, resampled every epoch
    drop_rate: float = 0.0  # probability that a mask group ends before each mask slot after the first
    correction_rank: int = 0  # of the draft correction; 0: none
    phrases: int = (
        DEFAULT_PHRASES  # maximum contexts of the data that are stored with the token that mostly follows them
    )
    mask_weight: float = 1.0  # weight of the mask slots' mean loss, relative to the next-token loss
    # Fork training
    unfork_rate: float = 0.2  # probability that a forked sample is trained without forks, resampled every epoch
    # Samples
    cutoff: int = DEFAULT_CUTOFF  # maximum tokens along a path, prompt included
    # Optimization
    epochs: float = 2.0
    max_steps: int | None = None
    time_budget: float | None = None  # seconds; the training ends earlier if its steps do
    batch_size: int = 32  # samples per step, over all processes
    micro_batch_size: int = 4  # samples per forward pass of one process
    learning_rate: float = 5e-5  # peak
    warmup: float = 0.03  # fraction of the steps
    weight_decay: float = 0.0
    clip: float = 1.0  # maximum gradient norm
    betas: tuple[float, float] = (0.9, 0.95)
    seed: int = 0
    # LoRA
    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()  # names of the adapted layers; empty: all linear layers

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("mask-slots", self.mask_slots, 1, MAX_MASK_SLOTS),
            ("anchors", self.anchors, 1, None),
            ("drop-rate", self.drop_rate, 0, 1),
            ("correction-rank", self.correction_rank, 0, MAX_CORRECTION_RANK),
            ("phrases", self.phrases, 0, None),
            ("mask-weight", self.mask_weight, 0, None),
            ("unfork-rate", self.unfork_rate, 0, 1),
            ("cutoff", self.cutoff, 8, None),
            ("max-steps", self.max_steps, 1, None),
            ("batch-size", self.batch_size, 1, None),
            ("micro-batch-size", self.micro_batch_size, 1, None),
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
            ("learning-rate", self.learning_rate),
            ("clip", self.clip),
            ("alpha", self.alpha),
            ("time-budget", self.time_budget),
        ):
            if positive is not None and not 0 < positive < float("inf"):
                raise OptionFault(f"--{name} is {positive}: expected more than 0")
        if self.targets and self.method not in ("lora", "gated-lora"):
            raise OptionFault(
                f"--target {self.targets[0]} with --method {self.method}, which adds no adapters: expected --method lora or "
                "gated-lora"
            )

    @property
    def drafts(self) -> bool:
        return self.objective in ("sar", "both")

    @property
    def forks(self) -> bool:
        return self.objective in ("apar", "both")

    @property
    def slots(self) -> int:
        """Number of mask slots that are trained."""
        return (self.mask_slots or DEFAULT_MASK_SLOTS) if self.drafts else 0

    @property
    def mask_layout(self) -> MaskLayout:
        """What mask rows predict and see."""
        return MaskLayout(
            CAUSAL.shift if self.shift is None else self.shift, CAUSAL.group if self.group is None else self.group
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class TokenNames:
    """Text of each special token that a tuned model uses."""

    masks: tuple[str, ...]
    fork: str | None
    child: str | None

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.masks, *(name for name in (self.fork, self.child) if name is not None))


DEFAULT = TokenNames(("[M]",), "[Fork]", "[Child]")


def resolve_token_names(
    mask_rows: int, distinct: bool, forks: bool, requested: TokenNames, sar_config: SarConfig
) -> TokenNames:
    """Token names for one tuning: the requested ones, except where the checkpoint's sar_config.json already has names."""
    for name in requested.all:
        if not name.strip() or len(set(requested.all)) < len(requested.all):
            raise OptionFault(
                f"special tokens {', '.join(map(repr, requested.all))}: expected non-empty names, all different"
            )
    masks = requested.masks if mask_rows else ()
    if masks and distinct:
        opening, closing = (masks[0][:-1], masks[0][-1]) if masks[0][-1:] in ")]>|" else (masks[0], "")
        masks = tuple(f"{opening}{slot + 1}{closing}" for slot in range(mask_rows))
    new = masks
    existing = sar_config.mask_tokens or ()
    if existing and (not mask_rows or len(existing) == len(masks)):
        masks = existing
    fork, child = (sar_config.fork_token, sar_config.child_token) if sar_config.fork_token else (None, None)
    if forks and fork is None:
        fork, child = requested.fork, requested.child
    names = TokenNames(masks, fork, child)
    unused = {*requested.all} - {*DEFAULT.all, *names.all, *(requested.masks if masks == new else ())}
    if unused:
        raise OptionFault(
            f"special token {min(unused)} would not be used: the tuned model's tokens are {', '.join(names.all)}; expected "
            "a name for a token that the objective needs and that the checkpoint's sar_config.json does not name already"
        )
    return names
