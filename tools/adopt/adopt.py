"""Adopt: find the method of published weights, check them, and write an adapter folder for their base model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from spaceport.exporter.adapter_folder import (
    embedding_rows,
    identity_of,
    write_adapter_folder,
)
from spaceport.exporter.atomic_folder import ADAPTER_FOLDER, temporary_folder, writing
from spaceport.exporter.checkpoint import Checkpoint, TokenFlags, load_model, load_tokenizer, open_checkpoint
from spaceport.exporter.checkpoint_source import provenance_of
from spaceport.exporter.mechanisms import DraftAdditions
from spaceport.exporter.sar_config import CheckpointError, is_origin, read_sar_config
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.streamed_weights import keep_values
from spaceport.tools.adopt.adapters import GATED_LORA, NEMOTRON, UNO
from spaceport.tools.adopt.given import SUBFOLDERS, TITLES, Given, refuse_noise_seed
from spaceport.tools.adopt.heads import MEDUSA
from spaceport.tools.adopt.plan import AdoptionPlan, Method
from spaceport.tools.tune.tunable_model import add_tokens, grown


class OtherLayout(NamedTuple):
    """A method that is recognized and refused."""

    name: str
    sign: Callable[[Given], str | None]  # what shows it
    reason: str
    advice: str = "export the checkpoint without it: it drafts with prompt lookup, or train it with `spaceport tune`"


def _types(*types: str) -> Callable[[Given], str | None]:
    """A sign: one of these types of model, which no base model of an adapter has."""

    def sign(given: Given) -> str | None:
        kind = given.config.get("model_type")
        linear = "linear_attention" in types and "linear_attention" in (given.config.get("layer_types") or ())
        return f"model_type {kind}" if kind in types or linear else None

    return sign


def _entries(*names: str, whole: bool = False) -> Callable[[Given], str | None]:
    """A sign: one of these entries in a config.json; `whole`: of a checkpoint without an adapter."""

    def sign(given: Given) -> str | None:
        if whole and given.adapter is not None:
            return None
        entries = (name for config in (given.config, given.training) for name in names if config.get(name))
        name = next(entries, None)
        return None if name is None else f"{name} in config.json"

    return sign


def _eagle(given: Given) -> str | None:
    for config in (given.config, given.training):
        name = next((name for name in config.get("architectures") or () if "eagle" in str(name).lower()), None)
        if name is not None:
            return f"architecture {name} in config.json"
    return _entries("eagle_config", "draft_vocab_size")(given)


def _block_diffusion(given: Given) -> str | None:
    whole = given.adapter is None and given.config.get("block_size") and "mask_token_id" in given.config
    return "block_size and mask_token_id in config.json" if whole else None


_LAYOUTS = (
    OtherLayout(
        "a model with recurrent layers",
        _types(
            *(
                "qwen3_next",
                "mamba",
                "mamba2",
                "falcon_mamba",
                "falcon_h1",
                "jamba",
                "bamba",
                "rwkv",
                "recurrent_gemma",
            ),
            "linear_attention",
        ),
        "a recurrent state cannot drop the tokens of a rejected draft",
        "expected a model whose layers all have attention",
    ),
    OtherLayout("EAGLE", _eagle, "its drafts come from a second network over hidden states"),
    OtherLayout(
        "DFlash or another speculator",
        _entries("dflash_config", "dspark_noise_token_id", "speculators_model_type"),
        "its drafts come from a second network over hidden states",
    ),
    OtherLayout(
        "PARD-2", _entries("pard2", "pard2_target_dim", "spd_type"), "its drafts need hidden states of another model"
    ),
    OtherLayout(
        "Nemotron-Labs-Diffusion without its adapter linear_spec_lora",
        _entries("dlm_type", "dlm_paradigm", whole=True),
        "no adapter drafts, and the base model's own drafts need no adapter folder",
        "copy linear_spec_lora into the folder; or write sar_config.json there, with mask_tokens, mask_slots, shift false "
        "and group block, and export it",
    ),
    OtherLayout(
        "SDAR, I-DLM or UNO as a whole checkpoint",
        _types("sdar", "sdar_moe"),
        "it has code of its own instead of its base model's",
        "give the base model as CHECKPOINT, such as Qwen3-8B in the format of transformers, and the adapter's folder as "
        "ADAPTER",
    ),
    OtherLayout(
        "block diffusion",
        _block_diffusion,
        "config.json does not say what a mask row predicts, and which rows of its block it sees",
        "if the checkpoint also generates with causal attention, write sar_config.json, with mask_tokens, mask_slots, shift "
        "and group, and export it",
    ),
)


def _recognize_pard(given: Given) -> str | None:
    entry = given.named_mask if given.adapter is None else None
    return None if entry is None else f"{entry.name} {entry.token} in config.json"


def _plan_pard(given: Given, evidence: str, checkpoint: Checkpoint) -> AdoptionPlan:
    if given.request.mask_tokens:
        raise OptionFault("--mask-token has no effect: config.json names the mask token; leave it out")
    refuse_noise_seed(given.request)
    masks = {str(token): token for token in checkpoint.tokens.mask}
    return AdoptionPlan(PARD, evidence, checkpoint, masks, checkpoint.drafts.mask_slots, None)


PARD = Method("pard", _recognize_pard, _plan_pard, writes=False)


METHODS = (MEDUSA, PARD, UNO, NEMOTRON, GATED_LORA)  # in the order of TITLES


def find_method(given: Given) -> tuple[Method, str]:
    """The method of what was given, and what shows it."""
    for layout in _LAYOUTS:
        if (sign := layout.sign(given)) is not None:
            raise CheckpointError(
                f"{given.adapter or given.checkpoint}: is {layout.name} ({sign}), which is not supported: {layout.reason}; "
                f"{layout.advice}"
            )
    requested = given.request.method
    if requested is not None and requested not in TITLES:
        raise OptionFault(f"--method is {requested!r}: expected one of {', '.join(TITLES)}")
    tried = [method for method in METHODS if requested in (None, method.name)]
    for method in tried:
        evidence = method.recognize(given)
        if evidence is not None:
            return method, evidence
    raise CheckpointError(_nothing_found(given, tried[0].expected if requested is not None else None))


def _nothing_found(given: Given, expected: str | None) -> str:
    if expected is not None:
        return (
            f"{given.adapter or given.checkpoint}: has nothing of --method {given.request.method}: expected {expected}; "
            "name the path of these weights, or leave --method out"
        )
    if given.adapter is None:
        return (
            f"{given.checkpoint}: config.json names no mask token: expected pard_token, ptd_token_id or mask_token_id in it, "
            "or an adapter as second path; a checkpoint without one drafts with prompt lookup only, or can be trained "
            "with `spaceport tune`"
        )
    return (
        f"{given.adapter}: no mask token is known, and no noise: expected mask_token_id in a config.json beside the adapter "
        "or in the folder above it; else give --mask-token for an adapter that acts on mask tokens (I-DLM), or --method uno "
        "for one that acts on random tokens"
    )


def write_adopted(plan: AdoptionPlan, folder: Path) -> None:
    """Write an adapter folder: the mechanism, the rows of the mask tokens, and the identity of the base model."""
    if plan.weights is None:
        raise ValueError("the plan has no weights: expected one of a method that writes")
    mechanism = plan.weights.read()
    checkpoint = plan.checkpoint
    model = _base_model(checkpoint, folder)
    base = identity_of(checkpoint.folder.name, model)
    if plan.noise is not None:
        _add_copies(checkpoint, model, list(plan.mask_tokens), plan.noise.ids)
    entries: dict[str, Any] = {"mask_tokens": list(plan.mask_tokens), **_origin(plan.method.name, plan.weights.path)}
    if plan.mask_tokens:
        entries |= {"mask_slots": plan.mask_slots, **asdict(plan.layout)}
    if plan.noise is not None:
        entries["noise"] = {"ids": list(plan.noise.ids), "seed": plan.noise.seed}
    forks = _fork_entries(checkpoint)
    tokens = {**plan.mask_tokens, **_fork_tokens(checkpoint, forks)}
    write_adapter_folder(folder, base, model, tokens, (mechanism,), {**entries, **forks})


def _base_model(checkpoint: Checkpoint, folder: Path) -> PreTrainedModel:
    """The base model in float32; its matrices except the embeddings stay in their files, if its checkpoint allows it."""
    model = load_model(checkpoint, "float32", scratch=folder)
    for table in embedding_rows(model):
        keep_values(table)
    return model


def _origin(method: str, published: Path) -> dict[str, str]:
    """The method, and the name of the published weights: their source in a cache of a model hub, else their folder."""
    folder = published if published.is_dir() else published.parent
    found, path = provenance_of(folder), folder.absolute()
    own = "/".join(path.parts[-1 - (path.name in SUBFOLDERS) :])
    name = f"{found['source']}@{found['revision']}" if "source" in found else own
    return {"method": method, **({"adapter": name} if is_origin(name) else {})}


def _fork_entries(checkpoint: Checkpoint) -> dict[str, Any]:
    """The entries about forks in the base model's own sar_config.json."""
    own = read_sar_config(checkpoint.folder)
    names = {"fork_token": own.fork_token, "child_token": own.child_token}
    forks = {name: token for name, token in names.items() if token is not None}
    return {**forks, "fork_by_default": own.fork_by_default} if forks else {}


def _fork_tokens(checkpoint: Checkpoint, forks: dict[str, Any]) -> dict[str, int]:
    ids = {"fork_token": checkpoint.tokens.fork, "child_token": checkpoint.tokens.child}
    return {str(forks[name]): token for name, token in ids.items() if name in forks and token is not None}


def _add_copies(checkpoint: Checkpoint, model: PreTrainedModel, texts: list[str], copied: Sequence[int]) -> None:
    """Add tokens to a model whose embeddings are copies of other tokens' embeddings."""
    ids = add_tokens(load_tokenizer(checkpoint), model, texts)
    with torch.no_grad():
        for rows in embedding_rows(model):
            rows[ids] = rows[list(copied)].clone()


def plan_adoption(given: Given, remote_code: bool = False) -> AdoptionPlan:
    """What was given, checked as far as possible without the weights of the base model."""
    method, evidence = find_method(given)
    flags = TokenFlags(max_mask_slots=given.request.max_mask_slots if not method.writes else None)
    checkpoint = open_checkpoint(given.checkpoint, flags, remote_code)
    for mechanism in checkpoint.mechanisms:
        if not mechanism.refines:
            raise CheckpointError(f"{given.checkpoint}: has {mechanism.name} already: expected its base model")
    return method.plan(given, evidence, checkpoint)


def write_adoption(plan: AdoptionPlan, target: Path, overwrite: bool) -> list[str]:
    """Write the folder for a plan; the names of its files."""
    if not plan.method.writes:
        raise OptionFault(
            f"{plan.checkpoint.folder} needs no TARGET: `spaceport export` reads it as it is; leave TARGET out, and run "
            f"`{next_command(plan, None)}`"
        )
    with writing(target, overwrite, ADAPTER_FOLDER) as folder:
        write_adopted(plan, folder)
        return sorted(file.name for file in folder.iterdir())


def additions_of(plan: AdoptionPlan) -> DraftAdditions:
    """What the export of a plan adds to the base model."""
    rows = int(plan.checkpoint.config.get_text_config().vocab_size)
    masks = tuple(plan.mask_tokens.values())
    mechanisms = () if plan.weights is None else (plan.weights.sizes,)
    return DraftAdditions(masks, grown(rows, 1 + max(masks, default=0)), mechanisms)


@contextmanager
def adopted_for_export(
    given: Given, bundle: Path, remote_code: bool, on_stage: Callable[[str], None]
) -> Iterator[Path | None]:
    """An adapter folder beside a bundle, removed when the block ends; None if the checkpoint is exported as it is."""
    on_stage("reading the published weights")
    plan = plan_adoption(given, remote_code)
    on_stage(f"adopting {plan.title}; shown by {plan.evidence}")
    if not plan.method.writes:
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
    return f"spaceport export {plan.checkpoint.folder} BUNDLE --adapter {target or 'TARGET'}"
