"""Kinds: the ways to draft that are held against plain decoding, and what plain decoding is for each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spaceport.graphs.contract.manifest import ExactDrafts, Manifest
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
    """All that a bundle promises: greedy texts, texts sampled with a seed, and texts in threads if it forks.

    Where drafts are exact in one line only, there are no trees and no threads side by side.
    """
    most, exact = manifest.max_mask_slots, manifest.exact_drafts
    plain = Decoding(max_tokens=max_tokens, mask_slots=0, lookup=0, fork=False)
    drawn = replace(plain, sampling=Sampling(temperature=1.0, seed=SEED))
    found = [
        DraftGroup(DraftKind("plain", plain), tuple(_drafts(plain, most, exact))),
        DraftGroup(DraftKind("plain, drawn", drawn), (_named("drawn", _widest(drawn, most, exact)),)),
    ]
    if manifest.tokens.fork is not None:
        forked = replace(plain, fork=True, max_threads=1)  # one thread behind the other: a row a step
        beside = replace(forked, max_threads=Decoding().threads(exact))
        side_by_side = (DraftKind("plain", beside),) if beside != forked else ()
        drafts = (*side_by_side, *_drafts(beside, most, exact))
        how = "forked" if side_by_side else "forked, in turn"
        kinds = tuple(_named(how, kind) for kind in drafts if kind.name != "chain k = 1")
        found.append(DraftGroup(DraftKind("plain, forked, in turn", forked), kinds))
    return found


def _drafts(plain: Decoding, most: int, exact: ExactDrafts) -> list[DraftKind]:
    """Every kind of draft with up to so many mask slots."""
    chains = [
        DraftKind(f"chain k = {k}", replace(plain, draft="chain", lookup=None, mask_slots=k))
        for k in sorted({1, most}, reverse=True)
        if 0 < k <= most
    ]
    return [*chains, _widest(plain, most, exact)]


def _widest(plain: Decoding, most: int, exact: ExactDrafts) -> DraftKind:
    """Drafts of mask slots and prompt lookup, as the runtime makes them by default."""
    name = f"{exact} with look-up" if most else "look-up"
    siblings = None if exact == "tree" else 1
    return DraftKind(name, replace(plain, draft="tree", draft_siblings=siblings, lookup=_LOOKUP, mask_slots=most))


def _named(how: str, kind: DraftKind) -> DraftKind:
    return DraftKind(f"{kind.name}, {how}", kind.decoding)
