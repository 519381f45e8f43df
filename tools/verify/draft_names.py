"""Draft names: what a model drafts with, in words."""

from __future__ import annotations

from spaceport.graphs.contract.signature import Signature


def predictor_of(signature: Signature) -> str:
    """What predicts beyond the next token: mask slot or head."""
    return "head" if signature.heads else "mask slot"


def named_drafts(count: int, predictor: str) -> str:
    """What drafts, such as "3 mask slots"."""
    return f"{count} {predictor}{'s' * (count > 1)}" if count else "prompt lookup"
