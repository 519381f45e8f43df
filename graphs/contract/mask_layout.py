"""Mask layout: what the mask rows behind a token predict and see, as they were trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Group = Literal["causal", "block"]
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True)
class MaskLayout:
    """What the mask rows of a group predict and see; all of them see the text before the group."""

    shift: bool = True  # a mask row predicts the token after its position; False: the one at its position
    group: Group = "causal"  # a mask row sees the mask rows of its group before it; block: all of them

    @property
    def lead(self) -> int:
        """Mask rows of a group before those of its mask slots.

        Without shift it is one: the mask row at the next position predicts what the token's own row decides.
        """
        return 0 if self.shift else 1

    def rows(self, mask_slots: int) -> int:
        """Mask rows of a group with this number of mask slots."""
        if self.shift or not mask_slots:  # first, since a step asks for the rows of each node several times
            return mask_slots
        return mask_slots + self.lead


CAUSAL = MaskLayout()
