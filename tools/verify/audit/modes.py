"""Modes: the decoding modes that are compared with plain decoding, each with its plain reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spaceport.graphs.contract.exactness import DraftShape, Exactness
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling

SEED = 1
_LOOKUP = 6  # tokens; the default prompt lookup of draft trees


@dataclass(frozen=True)
class AuditMode:
    """A named decoding mode."""

    name: str
    decoding: Decoding


@dataclass(frozen=True)
class ModeGroup:
    """Modes that must all generate the tokens of the same plain decoding, which feeds one row per step."""

    plain: AuditMode
    drafted: tuple[AuditMode, ...]

    @property
    def seed(self) -> int | None:
        """The sampling seed; None for greedy decoding."""
        return self.plain.decoding.sampling.seed

    @property
    def forks(self) -> bool:
        return bool(self.plain.decoding.fork)


def groups_for(manifest: Manifest, exactness: Exactness, max_tokens: int) -> list[ModeGroup]:
    """Every mode that a bundle supports: greedy, sampled with a seed, and with forked threads if it forks.

    Draft trees are left out if the engine's drafts are exact as chains only, concurrent threads if they are not the default.
    Where no drafts are exact, chains are compared nevertheless: users may request them.
    """
    mask_slots, exact = manifest.drafts.max_tokens, exactness.drafts
    plain = Decoding(max_tokens=max_tokens, mask_slots=0, lookup=0, fork=False)
    sampled = replace(plain, sampling=Sampling(temperature=1.0, seed=SEED))
    groups = [
        ModeGroup(AuditMode("plain", plain), tuple(_drafted(plain, mask_slots, exact))),
        ModeGroup(AuditMode("plain, sampled", sampled), (_renamed("sampled", _default(sampled, mask_slots, exact)),)),
    ]
    if manifest.tokens.fork is not None:
        sequential = replace(plain, fork=True, max_threads=1)  # one thread after the other: one row per step
        concurrent = replace(sequential, max_threads=Decoding().threads(exactness.parallel_threads))
        undrafted = (AuditMode("plain", concurrent),) if concurrent != sequential else ()
        modes = (*undrafted, *_drafted(concurrent, mask_slots, exact))
        suffix = "forked" if undrafted else "forked, sequential"
        drafted = tuple(_renamed(suffix, mode) for mode in modes if mode.name != "chain k = 1")
        groups.append(ModeGroup(AuditMode("plain, forked, sequential", sequential), drafted))
    return groups


def _drafted(plain: Decoding, mask_slots: int, exact: DraftShape) -> list[AuditMode]:
    """Chains with one and with all mask slots, and the default drafts."""
    chains = [
        AuditMode(f"chain k = {k}", replace(plain, draft="chain", lookup=None, mask_slots=k))
        for k in sorted({1, mask_slots}, reverse=True)
        if 0 < k <= mask_slots
    ]
    return [*chains, _default(plain, mask_slots, exact)]


def _default(plain: Decoding, mask_slots: int, exact: DraftShape) -> AuditMode:
    """Drafts from mask slots and prompt lookup, the runtime's default."""
    name = f"{'tree' if exact == 'tree' else 'chain'} with lookup" if mask_slots else "lookup"
    siblings = None if exact == "tree" else 1
    return AuditMode(name, replace(plain, draft="tree", draft_siblings=siblings, lookup=_LOOKUP, mask_slots=mask_slots))


def _renamed(suffix: str, mode: AuditMode) -> AuditMode:
    return AuditMode(f"{mode.name}, {suffix}", mode.decoding)
