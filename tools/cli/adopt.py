"""`spaceport adopt`: use weights of published methods that draft for themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spaceport.exporter.atomic_folder import ADAPTER_FOLDER, check_target
from spaceport.exporter.checkpoint_files import require_checkpoint
from spaceport.tools.adopt.plan import TITLES, AdoptionRequest, arrange, read_given
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
    given = read_given(
        require_checkpoint(base), adapter, AdoptionRequest(method, mask_token, max_mask_slots, noise_seed)
    )
    # torch is imported only once the paths are valid
    from spaceport.exporter.checkpoint import quiet_libraries
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
    adapter, heads, noise = report["adapter"], report["heads"], report["noise"]
    weights = adapter or heads
    base = f"; the weights call it {weights['named_base'] or 'nothing'}" if weights is not None else ""
    lines = {"method": f"{report['title']}; shown by {report['evidence']}", "base": f"{report['checkpoint']}{base}"}
    if report["mask_tokens"]:
        names = [name if name == str(id) else f"{name} ({id})" for name, id in report["mask_tokens"].items()]
        lines |= {"mask tokens": ", ".join(names), "mask slots": report["mask_slots"]}
    if noise is not None:
        lines["noise"] = f"copies of the tokens {', '.join(map(str, noise['ids']))}, seed {noise['seed']}"
    if adapter is not None:
        scales = ", ".join(f"{scale:g}" for scale in adapter["scales"])
        lines["adapter"] = f"rank {adapter['rank']}, scale {scales}, {adapter['modules']} modules"
    if heads is not None:
        count, present, configured = heads["count"], heads["present"], heads["configured"]
        named = "" if configured in (None, present) else f"; config.json names {configured}"
        files = ", ".join(heads["files"])
        lines["heads"] = f"{count} of {present} in {files}, with {heads['blocks']} residual blocks each{named}"
    lines["written"] = f"{report['target']}: {', '.join(report['written'])}" if report["written"] else "nothing"
    option = f" --adapter {report['target']}" if report["written"] else ""
    lines["next"] = report["next"]
    lines["acceptance"] = f"not measured: spaceport acceptance {report['checkpoint']} DATA{option} --save"
    for name, value in lines.items():
        click.echo(f"{name:<12} {value}")
