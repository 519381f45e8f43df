"""Check options: what a check compares, and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spaceport.graphs.contract.faults import OptionFault

DEFAULT_LONG = 1024
SHORTEST = 32


@dataclass(frozen=True)
class CheckOptions:
    """What a check compares, and how."""

    checkpoint: Path | None = None  # of the PyTorch model; None: compare the engines with each other
    backends: tuple[str, ...] = ()  # empty: all that can run here
    length: int | None = None  # tokens of the longest case; None: what all engines have capacity for
    threads: int = 0
    seed: int = 0
    remote_code: bool = False
    trust_engines: bool = False
    layers: bool = False  # also find the first layer value that is out of tolerance
    adapter: Path | None = None  # adapter folder of the checkpoint
    require_signature: Path | None = None  # public key file; audits open the bundle again

    def __post_init__(self) -> None:
        if self.length is not None and self.length < SHORTEST:
            raise OptionFault(f"--long-context is {self.length}: expected at least {SHORTEST}")
