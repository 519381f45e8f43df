"""Published drafts: Medusa's heads, and prefixes of SSD and BiTA, in the layout of their authors; some predict exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from support.published import FIRST, PERIOD, exact_model, write_checkpoint

# FasterDecoding's medusa_lm_head.pt for Vicuna is a pickled dictionary with the names below, beside a config.json that names
# 2 heads although the file has 5. SSD's forecast_module_state_dict.pt for Llama-3.2-3B-Instruct is one of two tensors, of
# the shapes 4 x 3072 and 28 x 2 x 1 x 8 x 16 x 128.
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


FILE = "forecast_module_state_dict.pt"
SLOTS = 16
_MISREAD = (6.0, -6.0)  # what mask rows read instead of a token
_KEY = 8.0


def write_published_prefix(folder: Path, prefix: Tensor, embedding: Tensor, **more: Tensor) -> Path:
    """A folder with the file of SSD."""
    folder.mkdir(parents=True)
    torch.save({"forecast_embedding": embedding, "forecast_prefix": prefix, **more}, folder / FILE)
    return folder


def write_bita(folder: Path, model: PreTrainedModel, prefix: Tensor, embedding: Tensor, **more: Any) -> Path:
    """A whole checkpoint as BiTA's code saves it: the prefix and the mask embeddings are among the model's weights.

    A row of the prefix has the keys and values of all layers, in the order of the layers.
    """
    slots = prefix.shape[-2]
    entries = {"prompt_num": slots, "mask_num": len(embedding), "mask_diff": len(embedding) > 1, **more}
    write_checkpoint(folder, model, **entries)
    own = {
        "model.mask_tokens.weight": embedding.contiguous(),
        "model.prefix_encoder.embedding.weight": prefix[:, :, 0].permute(3, 0, 1, 2, 4).reshape(slots, -1).contiguous(),
    }
    file = folder / "model.safetensors"
    save_file({**load_file(file), **own}, file, {"format": "pt"})
    return folder


def random_prefix(config: PreTrainedConfig, size: float = 1.0, slots: int = SLOTS, seed: int = 3) -> Tensor:
    """A random prefix for a model with this configuration: layers x 2 x 1 x KV heads x slots x D."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dice = torch.Generator().manual_seed(seed)
    return size * torch.randn((config.num_hidden_layers, 2, 1, heads, slots, dim), generator=dice)


def random_embedding(hidden_size: int, tokens: int = 3, seed: int = 4) -> Tensor:
    """Random embeddings of mask tokens."""
    return torch.randn((tokens, hidden_size), generator=torch.Generator().manual_seed(seed))


def exact_prefix(tokens: int) -> tuple[PreTrainedModel, Tensor, Tensor]:
    """A model whose text is given by the position, and a prefix with mask embeddings of which it predicts that text.

    A mask row reads something instead of a token. The last slot has a key that all rows look for, and a value that removes
    it. All other rows would predict wrongly, if they saw that slot.
    """
    model: Any = exact_model()
    attention = model.model.decoder.layers[0].self_attn
    config = model.config
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    embedding = torch.zeros(tokens, config.hidden_size)
    embedding[:, : len(_MISREAD)] = torch.tensor(_MISREAD)
    prefix = torch.zeros(config.num_hidden_layers, 2, 1, heads, SLOTS, dim)
    prefix[0, 0, 0, 0, -1, 0] = _KEY
    prefix[0, 1, 0, 0, -1, 0] = 1.0
    with torch.no_grad():
        attention.q_proj.bias[0] = _KEY
        attention.out_proj.weight[: len(_MISREAD), 0] = -torch.tensor(_MISREAD)
    return model, prefix, embedding
