"""Adopt: find the method of published weights, check them, and write an adapter folder for their base model."""

from __future__ import annotations

from pathlib import Path

from spaceport.exporter.atomic_folder import ADAPTER_FOLDER, writing
from spaceport.exporter.checkpoint import Checkpoint, open_checkpoint
from spaceport.exporter.sar_config import CheckpointError
from spaceport.exporter.special_tokens import TokenFlags
from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.adopt.given import Given
from spaceport.tools.adopt.methods import find_method
from spaceport.tools.adopt.plan import Method, Plan


def plan_adoption(given: Given, remote_code: bool = False) -> tuple[Method, Plan, Checkpoint]:
    """What was given, checked as far as possible without the weights of the base model."""
    method, evidence = find_method(given)
    flags = TokenFlags(max_mask_slots=given.request.max_mask_slots if given.adapter is None else None)
    checkpoint = open_checkpoint(given.checkpoint, flags, remote_code)
    if checkpoint.adapter is not None or checkpoint.heads is not None:
        what = "a mask adapter" if checkpoint.heads is None else "heads"
        raise CheckpointError(f"{given.checkpoint}: has {what} already: expected its base model")
    return method, method.plan(given, evidence, checkpoint), checkpoint


def write_adoption(method: Method, plan: Plan, checkpoint: Checkpoint, target: Path, overwrite: bool) -> list[str]:
    """Write the folder for a plan; the names of its files."""
    if method.write is None:
        raise OptionFault(
            f"{plan.checkpoint} needs no TARGET: `spaceport export` reads it as it is; leave TARGET out, and run "
            f"`{next_command(plan, None)}`"
        )
    with writing(target, overwrite, ADAPTER_FOLDER) as folder:
        method.write(plan, checkpoint, folder)
        return sorted(file.name for file in folder.iterdir())


def next_command(plan: Plan, target: Path | None) -> str:
    """The command that exports what was adopted."""
    if plan.peft is None and plan.heads is None:
        return f"spaceport export {plan.checkpoint} BUNDLE --max-mask-slots {plan.mask_slots}"
    return f"spaceport export {plan.checkpoint} BUNDLE --adapter {target or 'TARGET'}"
