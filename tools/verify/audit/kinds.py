"""Kinds: the ways to draft that are held against plain decoding, and what plain decoding is for each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling

SEED = 1
_LOOKUP = 6  # tokens; what trees look up unless they are told otherwise


@dataclass(frozen=True)
class DraftKind:
    """One way to decode, by its name."""

    name: str
    decoding: Decoding


@dataclass(frozen=True)
class DraftGroup:
    """Kinds that all have to write the text of the same plain decoding, which feeds one row a step."""

    plain: DraftKind
    drafted: tuple[DraftKind, ...]

    @property
    def seed(self) -> int | None:
        """Of what is drawn; none: the likeliest tokens are written."""
        return self.plain.decoding.sampling.seed

    @property
    def forks(self) -> bool:
        return bool(self.plain.decoding.fork)


def groups_for(manifest: Manifest, max_tokens: int) -> list[DraftGroup]:
    """All that a bundle can do: drafts in one line, drawn with a seed, and in threads if it forks."""
    plain = Decoding(max_tokens=max_tokens, mask_slots=0, lookup=0, fork=False)
    drawn = replace(plain, sampling=Sampling(temperature=1.0, seed=SEED))
    found = [
        DraftGroup(DraftKind("plain", plain), tuple(_drafts(plain, manifest.max_mask_slots))),
        DraftGroup(DraftKind("plain, drawn", drawn), (_named("drawn", _tree(drawn, manifest.max_mask_slots)),)),
    ]
    if manifest.tokens.fork is not None:
        forked = replace(plain, fork=True, max_threads=1)  # one thread behind the other: a row a step
        beside = replace(forked, max_threads=Decoding.max_threads)
        drafts = (DraftKind("plain", beside), *_drafts(beside, manifest.max_mask_slots))
        kinds = tuple(_named("forked", kind) for kind in drafts if kind.name != "chain k = 1")
        found.append(DraftGroup(DraftKind("plain, forked, in turn", forked), kinds))
    return found


def _drafts(plain: Decoding, most: int) -> list[DraftKind]:
    """Every kind of draft with up to so many mask slots."""
    chains = [
        DraftKind(f"chain k = {k}", replace(plain, draft="chain", lookup=None, mask_slots=k))
        for k in sorted({1, most}, reverse=True)
        if 0 < k <= most
    ]
    return [*chains, _tree(plain, most)]


def _tree(plain: Decoding, most: int) -> DraftKind:
    name = "tree with look-up" if most else "look-up"
    return DraftKind(name, replace(plain, draft="tree", lookup=_LOOKUP, mask_slots=most))


def _named(how: str, kind: DraftKind) -> DraftKind:
    return DraftKind(f"{kind.name}, {how}", kind.decoding)
