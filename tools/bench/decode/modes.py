"""Modes: the decoding modes that are compared, each with the reference mode that must generate the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.decoding import Decoding

PLAIN, DEFAULT, FORKED = "plain", "default", "forked"
MODES = (PLAIN, "lookup", "masks", DEFAULT, FORKED, "forked+drafted")
_MASKED = ("masks",)  # modes that need mask slots
FORKING = (FORKED, "forked+drafted")
_EXPECTED = f"expected comma-separated names among {', '.join(MODES)}"


@dataclass(frozen=True)
class DecodeMode:
    """A named decoding mode."""

    name: str
    decoding: Decoding  # greedy
    reference: str  # name of the mode without drafts that generates the same tokens


def parse_modes(text: str) -> tuple[str, ...]:
    """The names in `plain,default`."""
    names = tuple(part.strip() for part in text.split(","))
    if unknown := [name for name in names if name not in MODES]:
        raise OptionFault(f"--modes names {unknown[0]!r}: {_EXPECTED}")
    return names


def modes_for(
    manifest: Manifest, max_tokens: int, names: Sequence[str] | None = None, fixed: Sequence[int] = ()
) -> tuple[DecodeMode, ...]:
    """The modes with these names, or all that the bundle supports; their reference modes are always included.

    Each number in `fixed` adds a mode with chains of that many mask slots in every step.
    """
    for name in names or ():
        _check(name, manifest)
    wanted = set(names if names is not None else _all_of(manifest)) | {PLAIN}
    if wanted & set(FORKING):
        wanted.add(FORKED)
    chosen = [_mode(name, max_tokens) for name in MODES if name in wanted]
    return (*chosen, *(_chain(slots, max_tokens, manifest) for slots in dict.fromkeys(fixed)))


def _all_of(manifest: Manifest) -> list[str]:
    """All modes that the bundle supports; without mask slots "default" is prompt lookup, so "lookup" is left out."""
    left_out = {
        *(() if manifest.drafts.max_tokens else (*_MASKED, "lookup")),
        *(() if manifest.tokens.fork is not None else FORKING),
    }
    return [name for name in MODES if name not in left_out]


def _check(name: str, manifest: Manifest) -> None:
    if name in _MASKED and not manifest.drafts.max_tokens:
        raise OptionFault(f"--modes names {name!r}: expected a bundle with mask slots, this one has none: leave it out")
    if name in FORKING and manifest.tokens.fork is None:
        raise OptionFault(
            f"--modes names {name!r}: expected a bundle with a fork token, this one has none: leave it out"
        )


def _mode(name: str, max_tokens: int) -> DecodeMode:
    default = Decoding(max_tokens=max_tokens, fork=name in FORKING)
    plain = replace(default, mask_slots=0, lookup=0)
    decoding = {
        PLAIN: plain,
        "lookup": replace(plain, lookup=default.draft_config().lookup),
        "masks": replace(default, lookup=0),
        FORKED: plain,
    }.get(name, default)
    return DecodeMode(name, decoding, FORKED if name in FORKING else PLAIN)


def _chain(slots: int, max_tokens: int, manifest: Manifest) -> DecodeMode:
    if not 1 <= slots <= manifest.drafts.max_tokens:
        has = f"this one has {manifest.drafts.max_tokens}"
        raise OptionFault(f"--fixed names {slots}: expected 1 to the number of mask slots of the bundle, {has}")
    decoding = Decoding(max_tokens=max_tokens, mask_slots=slots, draft="chain", fork=False)
    return DecodeMode(f"fixed {slots}", decoding, PLAIN)
