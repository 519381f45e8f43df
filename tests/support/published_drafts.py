"""Published drafts: heads of Medusa in the layout of their authors; some predict exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from support.published import FIRST, PERIOD

# FasterDecoding's medusa_lm_head.pt for Vicuna is a pickled dictionary with the names below, beside a config.json that names
# 2 heads although the file has 5.
BASE = "lmsys/vicuna-7b-v1.3"


def exact_heads(model: PreTrainedModel, count: int) -> dict[str, Tensor]:
    """Heads that predict the text of support/published.exact_model.

    The first block of a head doubles each positive number: x + silu(W x) is about 2 x where W x is large.
    """
    output = model.get_output_embeddings().weight.detach()
    hidden = output.shape[1]
    found: dict[str, Tensor] = {}
    for head in range(count):
        rows = torch.zeros_like(output)
        for index in range(PERIOD):
            rows[FIRST + (index + 1 + head) % PERIOD] = output[FIRST + index]
        found[f"{head}.0.linear.weight"] = torch.eye(hidden)
        found[f"{head}.0.linear.bias"] = torch.full((hidden,), 0.5)
        found[f"{head}.1.weight"] = rows
    return found


def random_heads(count: int, blocks: int, hidden: int, vocab: int, seed: int = 0) -> dict[str, Tensor]:
    """Heads with random numbers, large enough that each block matters."""
    dice = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for head in range(count):
        for block in range(blocks):
            found[f"{head}.{block}.linear.weight"] = torch.randn(hidden, hidden, generator=dice) / hidden**0.5
            found[f"{head}.{block}.linear.bias"] = 0.5 * torch.randn(hidden, generator=dice)
        found[f"{head}.{blocks}.weight"] = torch.randn(vocab, hidden, generator=dice)
    return found


def write_published_heads(folder: Path, tensors: Mapping[str, Tensor], suffix: str = ".pt", **config: object) -> Path:
    """A folder with heads; the entries are added to config.json."""
    folder.mkdir(parents=True)
    file = folder / f"medusa_lm_head{suffix}"
    if suffix == ".pt":
        torch.save(dict(tensors), file)
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    entries = {"base_model_name_or_path": BASE, "medusa_num_heads": 2, "medusa_num_layers": 1, **config}
    (folder / "config.json").write_text(json.dumps(entries), "utf-8")
    return folder


def reference_lines(tensors: Mapping[str, Tensor], hidden: Tensor, count: int, blocks: int) -> list[Tensor]:
    """The logits of each head, by the formula of the paper (arXiv 2401.10774), extended to several blocks."""
    found = []
    for head in range(count):
        x = hidden
        for block in range(blocks):
            y = x @ tensors[f"{head}.{block}.linear.weight"].T + tensors[f"{head}.{block}.linear.bias"]
            x = x + y / (1 + torch.exp(-y))
        found.append(x @ tensors[f"{head}.{blocks}.weight"].T)
    return found
