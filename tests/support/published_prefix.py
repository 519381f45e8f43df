"""Published prefix: the file of SSD, a checkpoint of BiTA, and a model that their prefix makes predict exactly.

The published file, forecast_module_state_dict.pt, is a pickled dictionary of the two tensors below, which for
Llama-3.2-3B-Instruct have the shapes 4 x 3072 and 28 x 2 x 1 x 8 x 16 x 128.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from support.published import PERIOD, exact_model, write_checkpoint

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


assert len(_MISREAD) <= PERIOD
