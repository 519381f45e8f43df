"""Adapter writer: an adopted adapter as an adapter folder, beside its unchanged base model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from spaceport.exporter.adapter_folder import (
    embedding_rows,
    identity_of,
    write_adapter_folder,
)
from spaceport.exporter.checkpoint import Checkpoint, load_model, load_tokenizer
from spaceport.exporter.checkpoint_source import provenance_of
from spaceport.exporter.sar_config import is_origin, read_sar_config
from spaceport.graphs.streamed_weights import keep_values
from spaceport.tools.adopt.given import SUBFOLDERS
from spaceport.tools.adopt.plan import AdoptionPlan
from spaceport.tools.tune.vocabulary import add_tokens


def write_adopted(plan: AdoptionPlan, checkpoint: Checkpoint, folder: Path) -> None:
    """Write an adapter folder: the mechanism, the embeddings of the mask tokens, and the identity of the base model."""
    if plan.weights is None:
        raise ValueError("the plan has no weights: expected one of a method that writes")
    mechanism, embeddings = plan.weights.read()
    model = _base_model(checkpoint, folder)
    base = identity_of(checkpoint.folder.name, model)
    if embeddings is not None:
        ids = add_tokens(load_tokenizer(checkpoint), model, list(plan.mask_tokens))
        with torch.no_grad():
            cast(nn.Embedding, model.get_input_embeddings()).weight[ids] = embeddings[: len(ids)].float()
    if plan.noise is not None:
        _add_copies(checkpoint, model, list(plan.mask_tokens), plan.noise.ids)
    entries: dict[str, Any] = {"mask_tokens": list(plan.mask_tokens), **_origin(plan.method, plan.weights.path)}
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
