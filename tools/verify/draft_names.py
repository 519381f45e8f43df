"""Draft names: what a model drafts with, in words."""

from __future__ import annotations

from spaceport.graphs.contract.draft_methods import Predictor

# What predicts beyond the next token, in words.
PREDICTOR_NAMES: dict[Predictor, str] = {"mask": "mask slot", "head": "head"}


def named_drafts(count: int, predictor: str) -> str:
    """What drafts, such as "3 mask slots"."""
    return f"{count} {predictor}{'s' * (count > 1)}" if count else "prompt lookup"
