"""Token names: the mask, fork and child tokens of a tuned model, by their text."""

from __future__ import annotations

from dataclasses import dataclass

from spaceport.exporter.sar_config import SarConfig
from spaceport.graphs.contract.faults import OptionFault


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
