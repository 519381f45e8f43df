"""`spaceport adopt`: use weights of published methods that draft for themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spaceport.exporter.atomic_folder import ADAPTER_FOLDER, check_target
from spaceport.exporter.checkpoint_files import require_checkpoint
from spaceport.tools.adopt.given import TITLES, AdoptionRequest, arrange, read_given
from spaceport.tools.cli.options import PATH, json_option, overwrite_option, remote_code_option
from spaceport.tools.terminal.screen import show_json

method_option = click.option(
    "--method",
    metavar="NAME",
    help=f"Method of published weights, if the files do not show it: {', '.join(TITLES)}.",
)
noise_seed_option = click.option(
    "--noise-seed",
    type=click.IntRange(0),
    metavar="N",
    help="Seed of the random tokens that UNO has instead of mask tokens; default: 0.",
)
_METHODS = "\b\nMethods:\n" + "\n".join(f"  {name:<12}{title}" for name, title in TITLES.items())


@click.command("adopt", epilog=_METHODS)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="CHECKPOINT [ADAPTER] [TARGET]")
@method_option
@click.option(
    "--mask-token",
    multiple=True,
    metavar="ID|TOKEN",
    help="Mask token of the adapter, if no config.json names it: once for all mask slots, or once per mask slot.",
)
@click.option(
    "--max-mask-slots",
    type=click.IntRange(1),
    metavar="K",
    help="Maximum number of mask slots, default: 5 or what the files have; or number of heads.",
)
@noise_seed_option
@overwrite_option("adapter folder")
@remote_code_option
@json_option("the report")
def command(
    paths: tuple[Path, ...],
    method: str | None,
    mask_token: tuple[str, ...],
    max_mask_slots: int | None,
    noise_seed: int | None,
    overwrite: bool,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Detect the method of published weights and write an adapter folder for `spaceport export`.

    CHECKPOINT is the base model, or a checkpoint of PARD, which needs no TARGET. ADAPTER is a folder of peft or of Medusa
    heads; without it, the folder `adapter` in CHECKPOINT. TARGET is the new adapter folder.
    """
    base, adapter, target = arrange(paths)
    if target is not None:
        check_target(target, overwrite, ADAPTER_FOLDER)
    require_checkpoint(base)
    given = read_given(base, adapter, AdoptionRequest(method, mask_token, max_mask_slots, noise_seed))
    # torch is imported only once the paths are valid
    from spaceport.exporter.checkpoint_source import quiet_libraries
    from spaceport.tools.adopt.adopt import next_command, plan_adoption, write_adoption

    quiet_libraries()
    plan = plan_adoption(given, trust_remote_code)
    written = write_adoption(plan, target, overwrite)
    report = {
        **plan.as_dict(),
        "target": None if target is None else str(target),
        "written": written,
        "next": next_command(plan, target),
    }
    if as_json:
        show_json(report)
    else:
        _show(report)


def _show(report: dict[str, Any]) -> None:
    """Print a report as lines."""
    if report["heads"] is not None:
        _show_lines(_lines_of_heads(report))
        return
    masks = ", ".join(
        text if text == str(token) else f"{text} ({token})" for text, token in report["mask_tokens"].items()
    )
    lines = {
        "method": f"{report['title']}; shown by {report['evidence']}",
        "base": report["checkpoint"],
        "mask tokens": masks,
        "mask slots": report["mask_slots"],
        "drafts": "a mask row predicts the token after its position and sees the mask rows before it",
    }
    adapter, noise = report["adapter"], report["noise"]
    if noise is not None:
        lines["noise"] = f"copies of the tokens {', '.join(map(str, noise['ids']))}, seed {noise['seed']}"
    if adapter is not None:
        lines["base"] += f"; the adapter calls it {adapter['named_base'] or 'nothing'}"
        scales = ", ".join(f"{scale:g}" for scale in adapter["scales"])
        lines["adapter"] = f"rank {adapter['rank']}, scale {scales}, {adapter['modules']} modules"
    _show_lines({**lines, **_outcome(report)})


def _lines_of_heads(report: dict[str, Any]) -> dict[str, object]:
    heads = report["heads"]
    count, present, configured = heads["count"], heads["present"], heads["configured"]
    named = "" if configured in (None, present) else f"; config.json names {configured}"
    return {
        "method": f"{report['title']}; shown by {report['evidence']}",
        "base": f"{report['checkpoint']}; the heads call it {heads['named_base'] or 'nothing'}",
        "heads": f"{count} of {present} in {', '.join(heads['files'])}, with {heads['blocks']} residual blocks each{named}",
        "drafts": "each head predicts one token further ahead, the first one the token after the next",
        **_outcome(report),
    }


def _outcome(report: dict[str, Any]) -> dict[str, object]:
    written = f"{report['target']}: {', '.join(report['written'])}" if report["written"] else "nothing"
    adapter = f" --adapter {report['target']}" if report["written"] else ""
    measure = f"spaceport acceptance {report['checkpoint']} DATA{adapter} --save"
    return {"written": written, "next": report["next"], "acceptance": f"not measured: {measure}"}


def _show_lines(lines: dict[str, object]) -> None:
    for name, value in lines.items():
        click.echo(f"{name:<12} {value}")
