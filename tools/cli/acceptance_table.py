"""Acceptance table: the acceptance of several models, one row for each."""

from __future__ import annotations

from collections.abc import Sequence

import click

from spaceport.tools.terminal.screen import show_table
from spaceport.tools.verify.acceptance.comparison import ModelAcceptance

_DEPTHS = 8  # columns; --json has all


def show_models(found: Sequence[ModelAcceptance]) -> None:
    """Print tokens per step and acceptance by depth, on the answers that each model generates."""
    depths = min(_DEPTHS, max(one.draft_tokens for one in found))
    columns = ("model", "method", "drafts", "exact", "own", "lookup", "together", *map(_depth, range(1, 1 + depths)))
    show_table("Tokens per step, and acceptance by depth", columns, [_row(one, depths) for one in found])
    click.echo(
        "exact: tokens of the drafted answers that plain decoding selects. own: tokens per step with chains of mask slots or\n"
        "heads. lookup: with prompt lookup only. together: with trees of both. depth: draft tokens of the chains that are\n"
        "accepted."
    )


def _row(one: ModelAcceptance, depths: int) -> list[object]:
    rates = [*one.found.generated.acceptance, *[None] * depths][:depths]
    steps = () if one.steps is None else (one.steps.lookup.tokens_per_step, one.steps.together.tokens_per_step)
    per_step = (one.own_tokens_per_step, *steps)
    return [
        one.model,
        one.method,
        one.drafts,
        share(one.exact),
        *per_step,
        *map(share, rates),
    ]


def share(value: float | None) -> str:
    """A fraction as a percentage."""
    return "-" if value is None else f"{100 * value:.1f} %"


def _depth(depth: int) -> str:
    return f"depth {depth}"
