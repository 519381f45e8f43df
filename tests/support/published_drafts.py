"""Published drafts: for each method a tiny model that drafts by it, in the layout in which its authors publish theirs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from support.published import FIRST, MASK, PERIOD, exact_model, write_checkpoint, write_exact_adapter

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


def random_heads(count: int, blocks: int, hidden: int, vocab: int) -> dict[str, Tensor]:
    """Heads with random numbers, large enough that each block matters."""
    dice = torch.Generator().manual_seed(0)
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


SLOTS = 3
RANK = 16


@dataclass(frozen=True)
class PublishedModel:
    """A base model, published weights for it, and the options with which they are adopted."""

    base: Path
    weights: Path | None  # None: the base model has all that is needed
    options: tuple[str, ...] = ("--max-mask-slots", str(SLOTS))


def wrong_base(folder: Path) -> Path:
    """A base model whose mask token predicts wrongly without an adapter."""
    base = folder / "base"
    return base if base.exists() else write_checkpoint(base, exact_model(wrong_mask=True))


def pard(folder: Path) -> PublishedModel:
    """A checkpoint as amd/PARD-Qwen3-0.6B: the whole model, and pard_token in config.json."""
    return PublishedModel(write_checkpoint(folder / "pard", exact_model(), pard_token=MASK), None)


def gated_lora(folder: Path) -> PublishedModel:
    """LoRA of peft on a plain base model, with the mask token in a config.json beside it."""
    adapter = write_exact_adapter(folder / "lora", exact_model(wrong_mask=True), r=RANK, lora_alpha=2 * RANK)
    (adapter / "config.json").write_text(json.dumps({"block_size": 3, "mask_token_id": MASK}))
    return PublishedModel(wrong_base(folder), adapter)


def uno(folder: Path) -> PublishedModel:
    """An adapter as s-sahoo/uno-qwen3-8B: in the folder `adapter`, below a config.json with uniform noise."""
    adapter = folder / "uno" / "adapter"
    write_exact_adapter(adapter, exact_model(wrong_mask=True), r=RANK, lora_alpha=24, use_rslora=True)
    (folder / "uno" / "config.json").write_text(json.dumps({"noise": "uniform", "mask_token_id": 300}))
    return PublishedModel(wrong_base(folder), adapter)


def medusa(folder: Path) -> PublishedModel:
    """Heads as FasterDecoding/medusa-vicuna-7b-v1.3: a file of torch beside a config.json."""
    heads = write_published_heads(folder / "medusa", exact_heads(exact_model(), SLOTS))
    return PublishedModel(wrong_base(folder), heads)


METHODS: dict[str, Callable[[Path], PublishedModel]] = {
    "pard": pard,
    "gated-lora": gated_lora,
    "uno": uno,
    "medusa": medusa,
}


def exact_data(file: Path) -> Path:
    """Two texts that the exact models continue: the token at each position is the one that they predict there."""
    whole = "EFGHIJKD" * 6  # behind the first token, which the tokenizer adds
    file.write_text("".join(json.dumps({"text": whole[:length]}) + "\n" for length in (48, 43)), "utf-8")
    return file
