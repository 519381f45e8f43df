"""Draft methods: how a model drafts its own next tokens, and how often they were accepted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from spaceport.graphs.contract.draft_acceptance import DraftAcceptance, draft_acceptances
from spaceport.graphs.contract.json_fields import JsonField

Group = Literal["causal", "block"]
GROUPS: tuple[Group, ...] = get_args(Group)

Predictor = Literal["mask", "head"]
PREDICTORS: tuple[Predictor, ...] = get_args(Predictor)

MAX_MASK_SLOTS = 64
UNKNOWN, LOOKUP = "unknown", "lookup"  # names of a method that no file names, and of prompt lookup alone


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


@dataclass(frozen=True)
class DraftMethod:
    """How a model drafts its own next tokens, besides prompt lookup, which needs nothing of the model."""

    # As `spaceport adopt` names it, such as "uno", or as the checkpoint does.
    name: str = LOOKUP
    # Published weights with which the model drafts, as far as known.
    adapter: str | None = None
    # What predicts the tokens after the next one: mask rows behind a token by their own logits, or heads by further
    # lines of logits of the token's own row.
    predictor: Predictor = "mask"
    # Maximum draft tokens behind a token: mask slots or heads.
    max_tokens: int = 0
    # What mask rows predict and see.
    layout: MaskLayout = CAUSAL
    # What drafts add to the base model: the entry of each mechanism in sar_config.json, by its name.
    mechanisms: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Measured rates, one entry for each temperature.
    acceptance: tuple[DraftAcceptance, ...] = ()

    @property
    def mask_slots(self) -> int:
        """Maximum mask slots behind a token."""
        return self.max_tokens if self.predictor == "mask" else 0

    @property
    def heads(self) -> int:
        """Number of draft heads, each with a line of logits."""
        return self.max_tokens if self.predictor == "head" else 0

    @property
    def mask_rows(self) -> int:
        """Maximum mask rows behind a token."""
        return self.layout.rows(self.mask_slots)


LOOKUP_ONLY = DraftMethod()


def draft_method_of(found: JsonField) -> DraftMethod:
    """The draft method in parsed JSON."""
    entries = found.entries(DraftMethod)
    layout = entries["layout"].entries(MaskLayout)
    return DraftMethod(
        name=entries["name"].text(),
        adapter=entries["adapter"].or_none(JsonField.text),
        predictor=entries["predictor"].one_of(PREDICTORS),
        max_tokens=entries["max_tokens"].whole(0, MAX_MASK_SLOTS),
        layout=MaskLayout(shift=layout["shift"].boolean(), group=layout["group"].one_of(GROUPS)),
        mechanisms={name: entry.object() for name, entry in entries["mechanisms"].members().items()},
        acceptance=draft_acceptances(entries["acceptance"]),
    )
