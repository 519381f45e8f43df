"""`spaceport plan`: step costs on this machine and the drafts that pay off."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.planning import PlannedDrafts, drafts_of, drafts_of_heads, step_times
from spaceport.tools.cli.options import (
    backend_option,
    bundle_argument,
    json_option,
    require_signature_option,
    threads_option,
    trust_engines_option,
)
from spaceport.tools.terminal.screen import show_json, show_notes, show_table


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
@require_signature_option
@json_option("all tables")
def command(
    bundle: Path,
    acceptance: tuple[str, ...],
    requests: int,
    context: int,
    backend: str,
    threads: int,
    trust_engines: bool,
    require_signature: Path | None,
    as_json: bool,
) -> None:
    """Show the step costs of BUNDLE on this machine and the drafts that pay off at given acceptance rates.

    The runtime plans drafts with the same costs. They are measured once, in about two seconds, and cached.
    """
    rates = [_rates(text) for text in acceptance]
    if requests < 1 or context < 1:
        raise OptionFault(f"--requests is {requests}, --context {context}: expected at least 1 for both")
    options = {
        "backend": backend,
        "threads": threads,
        "trust_engines": trust_engines,
        "require_signature": require_signature,
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
        ("draft tokens at hand", "verified", *masks, "rows", "tokens", "time"),
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


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [-1.0]
    if not all(0 <= rate <= 1 for rate in rates):
        raise OptionFault(f"--acceptance is {text!r}: expected probabilities from 0 to 1, such as 0.8,0.7,0.6")
    return rates
