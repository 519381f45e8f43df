"""Adopt: find the method of published weights, check them, and write an adapter folder for their base model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from spaceport.exporter.atomic_folder import ADAPTER_FOLDER, temporary_folder, writing
from spaceport.exporter.checkpoint import Checkpoint, TokenFlags, load_model, load_tokenizer, open_checkpoint
from spaceport.exporter.checkpoint_files import is_origin, other_method, provenance_of
from spaceport.exporter.draft_files import embedding_rows, identity_of, write_adapter_folder
from spaceport.graphs.contract.faults import CheckpointError, OptionFault
from spaceport.graphs.streamed_weights import keep_values
from spaceport.tools.adopt.adapters import GATED_LORA, UNO
from spaceport.tools.adopt.heads import MEDUSA
from spaceport.tools.adopt.plan import HEADS_FILES, INSIDE, TITLES, AdoptionPlan, Given, Method, PublishedWeights
from spaceport.training.tunable_model import add_tokens


def _recognize_pard(given: Given) -> str | None:
    entry = given.named_mask if given.adapter is None else None
    return None if entry is None else f"{entry.name} {entry.token} in config.json"


def _plan_pard(given: Given, evidence: str, checkpoint: Checkpoint) -> AdoptionPlan:
    masks = {str(token): token for token in checkpoint.tokens.mask}
    return AdoptionPlan(PARD.name, evidence, checkpoint, masks, checkpoint.drafts.mask_slots, None)


# Its checkpoints are exported as they are.
PARD = Method("pard", _recognize_pard, _plan_pard, "config.json names the mask token")
METHODS = (MEDUSA, PARD, UNO, GATED_LORA)  # in the order of TITLES


def find_method(given: Given) -> tuple[Method, str]:
    """The method of what was given, and what shows it."""
    if (other := other_method(given.config, whole=given.adapter is None)) is not None:
        raise CheckpointError(
            f"{given.owner}: config.json has {other.entry}, so it drafts {other.drafts}: expected "
            f"{', '.join(TITLES)}; export the base model without it: it drafts with prompt lookup, or train it with "
            "`spaceport tune`"
        )
    requested = given.request.method
    if requested is not None and requested not in TITLES:
        raise OptionFault(f"--method is {requested!r}: expected one of {', '.join(TITLES)}")
    for method in METHODS:
        if requested in (None, method.name) and (evidence := method.recognize(given)) is not None:
            return method, evidence
    raise CheckpointError(_nothing_found(given))


def _nothing_found(given: Given) -> str:
    if given.request.method == MEDUSA.name:
        return (
            f"{given.owner}: has nothing of --method medusa: expected {' or '.join(HEADS_FILES)}, or "
            "medusa_num_heads in config.json; name the path of these weights, or leave --method out"
        )
    if given.adapter is None:
        return (
            f"{given.checkpoint}: config.json names no mask token: expected pard_token, ptd_token_id or mask_token_id in it, "
            "or an adapter as second path; a checkpoint without one drafts with prompt lookup only, or can be trained "
            "with `spaceport tune`"
        )
    return (
        f"{given.adapter}: no mask token is known, and no noise: expected mask_token_id in a config.json beside the adapter "
        "or in the folder above it; else give --mask-token for an adapter that acts on mask tokens, or --method uno for one "
        "that acts on random tokens"
    )


def _write_adopted(plan: AdoptionPlan, weights: PublishedWeights, folder: Path) -> None:
    """Write an adapter folder: the mechanism, the rows of the mask tokens, and the identity of the base model."""
    mechanism, checkpoint = weights.read(), plan.checkpoint
    model = load_model(checkpoint, "float32", scratch=folder)  # its matrices stay in their files, if they can
    for table in embedding_rows(model):
        keep_values(table)
    base = identity_of(checkpoint.folder.name, model)
    entries: dict[str, Any] = {"mask_tokens": list(plan.mask_tokens), **_origin(plan.method, weights.path)}
    if plan.mask_tokens:
        entries["mask_slots"] = plan.mask_slots
    if plan.noise is not None:
        ids = add_tokens(load_tokenizer(checkpoint), model, list(plan.mask_tokens))
        with torch.no_grad():
            for rows in embedding_rows(model):
                rows[ids] = rows[list(plan.noise.ids)].clone()
        entries["noise"] = {"ids": list(plan.noise.ids), "seed": plan.noise.seed}
    tokens, own = dict(plan.mask_tokens), checkpoint.source.files.sar_config
    forks = (
        ("fork_token", own.fork_token, checkpoint.tokens.fork),
        ("child_token", own.child_token, checkpoint.tokens.child),
    )
    for entry, name, token in forks:
        if name is not None and token is not None:
            tokens[name] = token
            entries |= {entry: name, "fork_by_default": own.fork_by_default}
    write_adapter_folder(folder, base, model, tokens, (mechanism,), entries)


def _origin(method: str, published: Path) -> dict[str, str]:
    """The method, and the name of the published weights: their source in a cache of a model hub, else their folder."""
    folder = published if published.is_dir() else published.parent
    found, path = provenance_of(folder), folder.absolute()
    own = "/".join(path.parts[-1 - (path.name == INSIDE) :])
    name = f"{found['source']}@{found['revision']}" if "source" in found else own
    return {"method": method, **({"adapter": name} if is_origin(name) else {})}


def plan_adoption(given: Given, remote_code: bool = False) -> AdoptionPlan:
    """What was given, checked as far as possible without the weights of the base model."""
    method, evidence = find_method(given)
    if given.request.mask_tokens and method.without_masks:
        raise OptionFault(f"--mask-token has no effect: {method.without_masks}; leave it out")
    if given.request.noise_seed is not None and not method.has_noise:
        raise OptionFault("--noise-seed has no effect: this method has no noise; leave it out")
    flags = TokenFlags(max_mask_slots=given.request.max_mask_slots if method is PARD else None)
    checkpoint = open_checkpoint(given.files, flags, remote_code)
    for mechanism in checkpoint.mechanisms:
        if not mechanism.refines:
            raise CheckpointError(f"{given.checkpoint}: has {mechanism.name} already: expected its base model")
    return method.plan(given, evidence, checkpoint)


def write_adoption(plan: AdoptionPlan, target: Path | None, overwrite: bool) -> list[str]:
    """Write the folder for a plan, if there is something to write; the names of its files."""
    if plan.weights is None:
        if target is None:
            return []
        raise OptionFault(
            f"{plan.checkpoint.folder} needs no TARGET: `spaceport export` reads it as it is; leave TARGET out, and run "
            f"`{next_command(plan, None)}`"
        )
    if target is None:
        raise OptionFault("no TARGET: expected CHECKPOINT [ADAPTER] TARGET")
    with writing(target, overwrite, ADAPTER_FOLDER) as folder:
        _write_adopted(plan, plan.weights, folder)
        return sorted(file.name for file in folder.iterdir())


@contextmanager
def adopted_for_export(
    given: Given, bundle: Path, remote_code: bool, on_stage: Callable[[str], None]
) -> Iterator[Path | None]:
    """An adapter folder beside a bundle, removed when the block ends; None if the checkpoint is exported as it is."""
    on_stage("reading the published weights")
    plan = plan_adoption(given, remote_code)
    on_stage(f"adopting {TITLES[plan.method]}; shown by {plan.evidence}")
    if plan.weights is None:
        yield None
        return
    with temporary_folder(bundle.with_name(f"{bundle.name}.adapter")) as folder:
        write_adoption(plan, folder / "adapter", overwrite=False)
        del plan
        yield folder / "adapter"


def next_command(plan: AdoptionPlan, target: Path | None) -> str:
    """The command that exports what was adopted."""
    if plan.weights is None:
        return f"spaceport export {plan.checkpoint.folder} BUNDLE --max-mask-slots {plan.mask_slots}"
    return f"spaceport export {plan.checkpoint.folder} BUNDLE --adapter {target}"
