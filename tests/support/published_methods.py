"""Published methods: for each method a tiny model that drafts by it, in the layout in which its authors publish theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.published import MASK, exact_model, write_checkpoint, write_exact_adapter
from support.published_drafts import exact_heads, write_published_heads

SLOTS = 3
WRONG = (6.0, -6.0)  # what the mask token reads as without its adapter: both it and its opposite predict wrongly
OPPOSITE = (-6.0, 6.0)
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
    return base if base.exists() else write_checkpoint(base, exact_model(WRONG))


def pard(folder: Path) -> PublishedModel:
    """A checkpoint as amd/PARD-Qwen3-0.6B: the whole model, and pard_token in config.json."""
    return PublishedModel(write_checkpoint(folder / "pard", exact_model(), pard_token=MASK), None)


def gated_lora(folder: Path) -> PublishedModel:
    """LoRA of peft on a plain base model, with the mask token in a config.json beside it."""
    adapter = write_exact_adapter(folder / "lora", exact_model(WRONG), OPPOSITE, r=RANK, lora_alpha=2 * RANK)
    (adapter / "config.json").write_text(json.dumps({"block_size": 3, "mask_token_id": MASK}))
    return PublishedModel(wrong_base(folder), adapter)


def uno(folder: Path) -> PublishedModel:
    """An adapter as s-sahoo/uno-qwen3-8B: in the folder `adapter`, below a config.json with uniform noise."""
    adapter = folder / "uno" / "adapter"
    write_exact_adapter(adapter, exact_model(WRONG), r=RANK, lora_alpha=24, use_rslora=True)
    (folder / "uno" / "config.json").write_text(json.dumps({"noise": "uniform", "mask_token_id": 300}))
    return PublishedModel(wrong_base(folder), adapter)


def medusa(folder: Path) -> PublishedModel:
    """Heads as FasterDecoding/medusa-vicuna-7b-v1.3: a file of torch beside a config.json."""
    return PublishedModel(
        wrong_base(folder), write_published_heads(folder / "medusa", exact_heads(exact_model(), SLOTS))
    )


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
