"""Draft: the candidates of a step as a tree, and the number of mask slots behind each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.mask_layout import CAUSAL, MaskLayout

Shape = Literal["chain", "tree"]
Source = Literal["mask", "head", "lookup", "both"]  # what proposed a candidate; both: prompt lookup and another
Reason = Literal["budget", "not_worth_it", "no_candidates", "grammar", "end_of_text", "row_limit", "shared_call"]
# Why a draft is narrower than its limits allow.
REASONS: dict[str, str] = {
    "budget": "drafts may not cost the request more time",
    "not_worth_it": "further rows are not expected to be worth their time",
    "no_candidates": "no source proposes a token",
    "grammar": "the grammar allows no proposed token",
    "end_of_text": "the text reaches its token limit",
    "row_limit": "the engine or the other threads take the rows",
    "shared_call": "the requests of the call agreed on fewer rows",
}


@dataclass(frozen=True)
class Candidates:
    """Candidates for one position from a mask slot or head: its most probable tokens, best first, with their probabilities."""

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]

    def behind(self, token: int) -> Candidates:
        """The candidates if this token is chosen for the position before."""
        return self


@dataclass(frozen=True)
class DraftConfig:
    """Limits of the drafts of a request; they change its speed and never its output."""

    mask_slots: int = 0  # maximum mask slots behind a node
    shape: Shape = "tree"
    rows: int = 24  # maximum rows of a thread in a step of a tree; a chain has mask_slots + 1 full groups
    siblings: int = 3  # maximum candidates for one position, of all sources; 1: the draft is a chain
    lookup: int = 0  # maximum tokens from prompt lookup; 0: no prompt lookup
    mask_layout: MaskLayout = CAUSAL
    heads: int = 0  # maximum draft tokens from heads; 0: none
    grammar: bool = False  # whether a grammar limits the candidates

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("siblings", 1), ("lookup", 0), ("heads", 0)):
            if (given := getattr(self, name)) < least:
                raise OptionFault(f"draft {name} is {given}: expected at least {least}")
        if self.shape not in ("chain", "tree"):
            raise OptionFault(f"draft shape is {self.shape!r}: expected chain or tree")

    @property
    def candidates(self) -> int:
        """Number of candidates to take from each mask slot or head."""
        return 1 if self.shape == "chain" else self.siblings

    @property
    def predictor(self) -> Source:
        """What predicts candidates besides prompt lookup."""
        return "head" if self.heads else "mask"


@dataclass(frozen=True)
class Draft:
    """Candidates for the tokens after the last known one; node 0 is that token, node 1 + i is candidate i."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # node before each candidate
    masks: tuple[int, ...] = (0,)  # mask slots behind each node
    sources: tuple[Source, ...] = ()  # of each candidate
    probabilities: tuple[float, ...] = ()  # estimated acceptance probability of each candidate; empty in a chain
    worth: tuple[float, ...] = ()  # expected tokens of 1, 2, ... rows, the best rows first; empty: unknown
    order: tuple[int, ...] = ()  # of the rows after the first: the node of a mask row, or -1 for a candidate
    mask_layout: MaskLayout = CAUSAL
    limited: Reason | None = None  # why it is narrower than its limits allow; None: it is not

    @property
    def rows(self) -> int:
        return 1 + len(self.tokens) + sum(map(self.mask_layout.rows, self.masks))

    def cut(self, rows: int, reason: Reason) -> Draft:
        """The draft with its best rows only, at most `rows`; a draft without an order of rows is not cut."""
        if not self.order or rows >= self.rows:
            return self
        masks = list(map(self.mask_layout.rows, self.masks))
        for node in self.order[rows - 1 :]:
            if node >= 0:
                masks[node] -= 1
        count = self.order[: rows - 1].count(-1)
        lead = self.mask_layout.lead
        return Draft(
            self.tokens[:count],
            self.parents[:count],
            tuple([max(0, each - lead) for each in masks[: count + 1]]),
            self.sources[:count],
            self.probabilities[:count],
            self.worth[:rows],
            self.order[: rows - 1],
            self.mask_layout,
            reason,
        )


def best_chain(candidates: Sequence[Candidates], last: int) -> list[Candidates]:
    """The candidates of each mask slot behind the best one of the mask slot before; `last` is the last known token."""
    found: list[Candidates] = []
    for each in candidates:
        found.append(each.behind(last))
        last = found[-1].tokens[0] if found[-1].tokens else last
    return found


PLAIN = Draft()


def chain(
    candidates: Sequence[int],
    mask_slots: int,
    remaining: int,
    rows: int | None = None,
    mask_layout: MaskLayout = CAUSAL,
    source: Source = "mask",
) -> Draft:
    """SPACE's draft: a chain of candidates, and the same number of mask slots behind every node.

    `remaining` is the number of tokens that the thread may still generate; nothing is drafted beyond it. `rows` is the
    maximum number of rows, that of the last known token included.
    """
    tokens = tuple(candidates[: max(0, remaining - 1)])
    if rows is not None:
        tokens = tokens[: rows - 1]
        mask_slots = min(mask_slots, rows // (len(tokens) + 1) - 1 - mask_layout.lead)
    parents = tuple(range(len(tokens)))
    masks = tuple(max(0, min(mask_slots, remaining - 2 - depth)) for depth in range(len(tokens) + 1))
    return Draft(tokens, parents, masks, (source,) * len(tokens), mask_layout=mask_layout)
