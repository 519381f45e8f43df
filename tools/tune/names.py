"""Names: the mask, fork and child tokens of a tuned model, by their text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spaceport.graphs.contract.faults import OptionFault


@dataclass(frozen=True)
class Names:
    """The tokens that a tuned model needs, by their text."""

    masks: tuple[str, ...]
    fork: str | None
    child: str | None

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.masks, *(name for name in (self.fork, self.child) if name is not None))


DEFAULT = Names(("[M]",), "[Fork]", "[Child]")


def names_for(mask_slots: int, distinct: bool, forks: bool, asked: Names, told: dict[str, Any]) -> Names:
    """The names for a tuning: what was asked for, with the tokens that the checkpoint's sar_config.json tells kept."""
    for name in asked.all:
        if not name.strip() or len(set(asked.all)) < len(asked.all):
            raise OptionFault(f"the tokens {', '.join(map(repr, asked.all))}: expected a text for each, all different")
    masks = asked.masks if mask_slots else ()
    if masks and distinct:
        opening, closing = (masks[0][:-1], masks[0][-1]) if masks[0][-1:] in ")]>|" else (masks[0], "")
        masks = tuple(f"{opening}{slot + 1}{closing}" for slot in range(mask_slots))
    new = masks
    known = tuple(str(name) for name in told.get("mask_tokens") or ())
    if known and (not mask_slots or len(known) == len(masks)):
        masks = known
    fork, child = (told.get("fork_token"), told.get("child_token")) if told.get("fork_token") else (None, None)
    if forks and fork is None:
        fork, child = asked.fork, asked.child
    found = Names(masks, fork, child)
    unused = {*asked.all} - {*DEFAULT.all, *found.all, *(asked.masks if masks == new else ())}
    if unused:
        raise OptionFault(
            f"no use for the token {min(unused)}: the tuned model's tokens are {', '.join(found.all)}; expected a name for a "
            "token that the objective needs and that the checkpoint's sar_config.json does not name already"
        )
    return found
