"""`spaceport plan`: step costs on this machine and the drafts that pay off at given acceptance rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path

import click

from spaceport.graphs.contract.draft_methods import CAUSAL, MaskLayout
from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.costs import Curve, StepCosts
from spaceport.runtime.decode.draft import Draft, DraftConfig, Outlook, tree
from spaceport.runtime.decode.planner import ChainProposal, LongRun, chances_of, solve
from spaceport.runtime.session import Runtime
from spaceport.tools.cli.bench import parse_numbers
from spaceport.tools.cli.options import (
    backend_option,
    bundle_argument,
    json_option,
    threads_option,
    trust_engines_option,
)
from spaceport.tools.terminal.screen import show_json, show_notes, show_table

ROWS = (1, 2, 4, 6, 9, 12, 16, 24, 36, 64)
MOST_ROWS = 64
_LONG = 1 << 30  # tokens that a text may still get


@dataclass(frozen=True)
class PlannedRows:
    """The time of a step with a number of rows per request."""

    rows: int
    milliseconds: float
    ratio: float  # to a step with one row per request


@dataclass(frozen=True)
class PlannedStep:
    """The best step for a number of available draft tokens."""

    at_hand: int
    masks: tuple[int, ...]  # mask slots behind the last known token, and behind each draft token that is verified
    tokens: float  # expected tokens that the step generates
    time: float
    rows: int


@dataclass(frozen=True)
class PlannedDrafts:
    """The best drafts for one table of acceptance rates."""

    acceptance: tuple[float, ...]  # acceptance rate by depth, given that the token before was accepted
    speedup: float  # over plain decoding
    tokens_per_step: float
    steps: tuple[PlannedStep, ...]  # by number of available draft tokens


def step_times(costs: StepCosts, requests: int, visible: int) -> list[PlannedRows]:
    """Step times by number of rows."""
    one = costs.seconds(1, requests, visible)
    return [
        PlannedRows(rows, seconds * 1e3, seconds / one)
        for rows, seconds in ((rows, costs.seconds(rows, requests, visible)) for rows in ROWS)
    ]


def drafts_of(
    costs: StepCosts,
    acceptance: Sequence[float],
    mask_slots: int,
    requests: int,
    visible: int,
    mask_layout: MaskLayout = CAUSAL,
) -> PlannedDrafts:
    """The best drafts for these acceptance rates; deeper mask slots have the last rate."""
    rates, reach = _by_depth(acceptance, mask_slots)
    curve = costs.curve(MOST_ROWS, requests=requests, visible=visible)
    limits = DraftConfig(mask_slots, rows=MOST_ROWS, siblings=1, mask_layout=mask_layout)
    solution = solve(curve, reach, mask_layout)
    steps = tuple(
        PlannedStep(at_hand, draft.masks, 1 + sum(reach[: len(draft.tokens)]), curve.times[draft.rows - 1], draft.rows)
        for at_hand, draft in enumerate(best_drafts(curve, reach, limits, solution))
    )
    return PlannedDrafts(rates, solution.rate, solution.rate * _mean_time(steps, reach), steps)


def drafts_of_heads(
    costs: StepCosts, acceptance: Sequence[float], heads: int, requests: int, visible: int
) -> PlannedDrafts:
    """The best number of draft tokens from heads, which take no rows of their own and predict all of them in every step."""
    rates, reach = _by_depth(acceptance, heads)
    times = costs.curve(MOST_ROWS, requests=requests, visible=visible).times
    expected = enumerate(accumulate(reach, initial=1.0))
    choices = [
        PlannedStep(heads, (0,) * (verified + 1), tokens, times[verified], verified + 1)
        for verified, tokens in expected
    ]
    best = max(choices, key=lambda step: step.tokens / step.time)
    return PlannedDrafts(rates, best.tokens / best.time, best.tokens, (best,))


def best_drafts(curve: Curve, reach: Sequence[float], draft_config: DraftConfig, run: LongRun) -> list[Draft]:
    """The best draft for each number of available draft tokens, from 0 on."""
    chances = chances_of(reach)
    outlook, rows = Outlook(curve, run.rate, run.gains), len(curve.times)
    return [
        tree((ChainProposal(chances[:at_hand]),), draft_config, _LONG, rows, outlook)
        for at_hand in range(len(reach) + 1)
    ]


def _by_depth(acceptance: Sequence[float], depths: int) -> tuple[tuple[float, ...], list[float]]:
    """The acceptance rate of each depth, and the probability that all tokens up to it are accepted."""
    rates = tuple(acceptance[min(depth, len(acceptance) - 1)] for depth in range(depths))
    return rates, list(accumulate(rates, mul))


def _mean_time(steps: Sequence[PlannedStep], reach: Sequence[float], rounds: int = 200) -> float:
    """The mean step time in the long run, where the mask slots of each step yield the draft tokens of the next."""
    reached = [1.0, *reach, 0.0]
    shares = [1.0] + [0.0] * (len(steps) - 1)  # probability of each number of available draft tokens
    total = [0.0] * len(steps)
    for _ in range(rounds):
        after = [0.0] * len(steps)
        for share, step in zip(shares, steps, strict=True):
            verified = len(step.masks) - 1
            for node, masks in enumerate(step.masks):
                after[masks] += share * (reached[node] - (reached[node + 1] if node < verified else 0.0))
        shares = after
        total = [sum(pair) for pair in zip(total, shares, strict=True)]
    return sum(count * step.time for count, step in zip(total, steps, strict=True)) / rounds


@click.command("plan")
@bundle_argument
@click.option(
    "--acceptance",
    multiple=True,
    metavar="P,P,…",
    default=("0.5", "0.7", "0.9"),
    show_default="0.5, then 0.7, then 0.9, a table each",
    help="Acceptance rates by depth for one table, each given that the token before is accepted; the last one is used for "
    "all further depths; repeatable.",
)
@click.option("--requests", default=1, show_default=True, metavar="N", help="Concurrent requests per step.")
@click.option(
    "--context", default=256, show_default=True, metavar="N", help="Context length of each request in tokens."
)
@backend_option
@threads_option
@trust_engines_option
@json_option("all tables")
def command(
    bundle: Path,
    acceptance: tuple[str, ...],
    requests: int,
    context: int,
    backend: str,
    threads: int,
    trust_engines: bool,
    as_json: bool,
) -> None:
    """Show the step costs of BUNDLE on this machine and the drafts that pay off at given acceptance rates.

    The runtime plans drafts with the same costs. They are measured once, in about two seconds, and cached.
    """
    rates = [parse_numbers("--acceptance", text, 0, 1) for text in acceptance]
    if requests < 1 or context < 1:
        raise OptionFault(f"--requests is {requests}, --context {context}: expected at least 1 for both")
    options = {
        "backend": backend,
        "threads": threads,
        "trust_engines": trust_engines,
    }
    with Runtime.open(bundle, max_requests=requests, **options) as runtime:  # type: ignore[arg-type]
        manifest = runtime.bundle.manifest
        costs, most, layout = runtime.costs, manifest.drafts.mask_slots, manifest.drafts.layout
        heads = manifest.drafts.heads
        show_notes(runtime.notes)
    rows = step_times(costs, requests, context)
    if heads:
        drafts = [drafts_of_heads(costs, each, heads, requests, context) for each in rates]
    else:
        drafts = [drafts_of(costs, each, most, requests, context, layout) for each in rates]
    if as_json:
        plans = [asdict(each) for each in drafts]
        show_json({"requests": requests, "context": context, "rows": [asdict(each) for each in rows], "drafts": plans})
        return
    title = f"Steps of {requests} request{'s' * (requests > 1)} with {context} tokens of context"
    show_table(title, ("rows", "ms", "relative cost"), [(each.rows, each.milliseconds, each.ratio) for each in rows])
    if not most and not heads:
        click.echo("\nThe bundle has no mask slots: it drafts with prompt lookup only.")
        return
    for each in drafts:
        click.echo()
        _show(each, most)


def _show(drafts: PlannedDrafts, mask_slots: int) -> None:
    rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(drafts.acceptance))
    title = f"Acceptance rate {rates}: {drafts.tokens_per_step:.2f} tokens per step, {drafts.speedup:.2f} times as fast as plain decoding"
    masks = ("mask slots behind each",) if mask_slots else ()
    show_table(
        title,
        ("draft tokens at hand", "verified", *masks, "rows", "tokens", "relative cost"),
        [
            (
                step.at_hand,
                len(step.masks) - 1,
                *([" ".join(map(str, step.masks))] if mask_slots else []),
                *(step.rows, step.tokens, step.time),
            )
            for step in drafts.steps
        ],
    )
