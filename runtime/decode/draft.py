"""Draft: the candidates of a step as a tree, and how many masks stand behind each of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spaceport.graphs.contract.faults import OptionFault

Shape = Literal["chain", "tree"]
Source = Literal["mask", "lookup", "both"]  # who proposed a candidate


@dataclass(frozen=True)
class Candidates:
    """What a mask slot says comes at one place: its likeliest tokens, best first, and how likely each of them is."""

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class DraftConfig:
    """How the threads of a request draft; it changes how long a text takes and never what it is."""

    mask_slots: int = 0  # most mask slots behind a node
    shape: Shape = "tree"
    rows: int = 24  # most rows of a thread in a step; a chain has (mask_slots + 1)²
    siblings: int = 3  # most candidates for one place, whoever proposed them; 1: the draft is one line
    lookup: int = 0  # most tokens that are looked up in the text so far; 0: none are

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("siblings", 1), ("lookup", 0)):
            if (given := getattr(self, name)) < least:
                raise OptionFault(f"draft {name} is {given}: expected at least {least}")
        if self.shape not in ("chain", "tree"):
            raise OptionFault(f"draft shape is {self.shape!r}: expected chain or tree")

    @property
    def candidates(self) -> int:
        """How many tokens of each mask slot are of use."""
        return 1 if self.shape == "chain" else self.siblings


@dataclass(frozen=True)
class Draft:
    """Candidates for the tokens after the last known one; node 0 is that token, node 1 + i is candidate i."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # node before each candidate
    masks: tuple[int, ...] = (0,)  # mask slots behind each node
    sources: tuple[Source, ...] = ()  # of each candidate
    probabilities: tuple[float, ...] = ()  # that each candidate is accepted, as far as it was thought about
    worth: tuple[float, ...] = ()  # tokens that 1, 2, ... rows are worth, the best rows first; empty: that is not known
    order: tuple[int, ...] = ()  # of the rows behind the first: the node of a mask slot, or -1 for a candidate

    @property
    def rows(self) -> int:
        return 1 + len(self.tokens) + sum(self.masks)

    def cut(self, rows: int) -> Draft:
        """Its best rows, `rows` at most; a draft whose rows have no order stays whole."""
        if not self.order or rows >= self.rows:
            return self
        masks = list(self.masks)
        for node in self.order[rows - 1 :]:
            if node >= 0:
                masks[node] -= 1
        kept = self.order[: rows - 1].count(-1)
        return Draft(
            self.tokens[:kept],
            self.parents[:kept],
            tuple(masks[: kept + 1]),
            self.sources[:kept],
            self.probabilities[:kept],
            self.worth[:rows],
            self.order[: rows - 1],
        )


PLAIN = Draft()
_MASK: Source = "mask"


def chain(candidates: Sequence[int], mask_slots: int, remaining: int, rows: int | None = None) -> Draft:
    """SPACE's draft: one line of candidates, and the same number of mask slots behind every node.

    `room` is how many tokens the text may still grow by: what could only be written beyond it is not drafted. `rows` is
    how many rows there may be, that of the last known token among them.
    """
    tokens = tuple(candidates[: max(0, remaining - 1)])
    if rows is not None:
        tokens = tokens[: rows - 1]
        mask_slots = min(mask_slots, rows // (len(tokens) + 1) - 1)
    parents = tuple(range(len(tokens)))
    masks = tuple(max(0, min(mask_slots, remaining - 2 - depth)) for depth in range(len(tokens) + 1))
    return Draft(tokens, parents, masks, (_MASK,) * len(tokens))
