"""Adopt: find the method of published weights, check them, and write an adapter folder for their base model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spaceport.exporter.atomic_folder import ADAPTER_FOLDER, temporary_folder, writing
from spaceport.exporter.checkpoint import Checkpoint, TokenFlags, open_checkpoint
from spaceport.exporter.mechanisms import DraftAdditions
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.adopt.adapter_writer import write_adopted
from spaceport.tools.adopt.given import Given
from spaceport.tools.adopt.methods import find_method
from spaceport.tools.adopt.plan import AdoptionPlan, Method
from spaceport.tools.tune.vocabulary import grown


def plan_adoption(given: Given, remote_code: bool = False) -> tuple[Method, AdoptionPlan, Checkpoint]:
    """What was given, checked as far as possible without the weights of the base model."""
    method, evidence = find_method(given)
    flags = TokenFlags(max_mask_slots=given.request.max_mask_slots if not method.writes else None)
    checkpoint = open_checkpoint(given.checkpoint, flags, remote_code)
    for mechanism in checkpoint.mechanisms:
        if not mechanism.refines:
            raise CheckpointError(f"{given.checkpoint}: has {mechanism.name} already: expected its base model")
    return method, method.plan(given, evidence, checkpoint), checkpoint


def write_adoption(
    method: Method, plan: AdoptionPlan, checkpoint: Checkpoint, target: Path, overwrite: bool
) -> list[str]:
    """Write the folder for a plan; the names of its files."""
    if not method.writes:
        raise OptionFault(
            f"{plan.checkpoint} needs no TARGET: `spaceport export` reads it as it is; leave TARGET out, and run "
            f"`{next_command(plan, None)}`"
        )
    with writing(target, overwrite, ADAPTER_FOLDER) as folder:
        write_adopted(plan, checkpoint, folder)
        return sorted(file.name for file in folder.iterdir())


def additions_of(plan: AdoptionPlan, checkpoint: Checkpoint) -> DraftAdditions:
    """What the export of a plan adds to the base model."""
    rows = int(checkpoint.config.get_text_config().vocab_size)
    masks = tuple(plan.mask_tokens.values())
    mechanisms = () if plan.weights is None else (plan.weights.sizes,)
    return DraftAdditions(masks, grown(rows, 1 + max(masks, default=0)), mechanisms)


@contextmanager
def adopted_for_export(
    given: Given, bundle: Path, remote_code: bool, on_stage: Callable[[str], None]
) -> Iterator[Path | None]:
    """An adapter folder beside a bundle, removed when the block ends; None if the checkpoint is exported as it is."""
    on_stage("reading the published weights")
    method, plan, checkpoint = plan_adoption(given, remote_code)
    on_stage(f"adopting {method.title}; shown by {plan.evidence}")
    if not method.writes:
        yield None
        return
    with temporary_folder(bundle.with_name(f"{bundle.name}.adapter")) as folder:
        write_adoption(method, plan, checkpoint, folder / "adapter", overwrite=False)
        del plan, checkpoint
        yield folder / "adapter"


def next_command(plan: AdoptionPlan, target: Path | None) -> str:
    """The command that exports what was adopted."""
    if plan.weights is None:
        return f"spaceport export {plan.checkpoint} BUNDLE --max-mask-slots {plan.mask_slots}"
    return f"spaceport export {plan.checkpoint} BUNDLE --adapter {target or 'TARGET'}"
