"""Options: the options of `bench chat`, validated before the bundle is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.tools.bench.compare.subjects import Peer
from spaceport.tools.bench.decode.modes import FORKING, MODES, DecodeMode, modes_for

_MANY_PROMPTS = 40  # from here on one round is the default
_FEW_ROUNDS = 3
_NAMES = tuple(name for name in MODES if name not in FORKING)


@dataclass(frozen=True)
class PeerOptions:
    """The other runtimes that are measured, and their model files."""

    peers: tuple[Peer, ...]
    work: Path  # folder of their environments
    checkpoint: Path | None  # for transformers
    gguf: Path | None  # for llama.cpp
    sample: int | None  # prompts of each kind; None: all
    setup: bool  # create missing environments first


@dataclass(frozen=True)
class ChatOptions:
    """What is measured, and how the engine is opened."""

    max_tokens: int = 128  # per answer
    sample: int | None = None  # prompts of each kind; None: all
    modes: tuple[str, ...] | None = None  # None: all that the bundle supports
    fixed: tuple[int, ...] | None = None  # mask slots of chains in every step; None: those of the bundle
    rounds: int | None = None  # None: one from _MANY_PROMPTS prompts on, else _FEW_ROUNDS
    seed: int = 0  # of the intervals
    fork_kinds: tuple[str, ...] = ("lists",)  # kinds of prompts that are also answered in parallel threads
    fork_max_tokens: int = 256  # per thread, the prompt's tokens not counted
    backend: str = "auto"
    threads: int = 1
    max_seq_len: int | None = None
    trust_engines: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "sample", "rounds", "fork_max_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionFault(f"--{name.replace('_', '-')} is {value}: expected at least 1")
        if self.seed < 0:
            raise OptionFault(f"--seed is {self.seed}: expected at least 0")
        if unknown := [name for name in self.modes or () if name not in _NAMES]:
            remedy = "forked threads are measured on --fork-kinds" if unknown[0] in FORKING else "choose among them"
            raise OptionFault(f"--modes names {unknown[0]!r}: expected names among {', '.join(_NAMES)}: {remedy}")

    def rounds_for(self, prompts: int) -> int:
        """Measured rounds with this number of prompts."""
        return self.rounds or (1 if prompts >= _MANY_PROMPTS else _FEW_ROUNDS)

    def modes_of(self, manifest: Manifest) -> tuple[DecodeMode, ...]:
        """The modes that are measured on all prompts; plain decoding is always one of them."""
        slots = manifest.drafts.max_tokens
        names = self.modes or (_NAMES if slots else ("plain", "default"))
        fixed = ((slots,) if slots else ()) if self.fixed is None else self.fixed
        return modes_for(manifest, self.max_tokens, names, fixed)

    def forking_modes_of(self, manifest: Manifest) -> tuple[DecodeMode, ...]:
        """The modes that are measured on prompts of the forking kinds; none if the model does not fork."""
        if manifest.tokens.fork is None or not self.fork_kinds:
            return ()
        return modes_for(manifest, self.fork_max_tokens, ("plain", "default", *FORKING))
