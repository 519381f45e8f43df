"""Calibration: texts that a model samples itself, from which GPTQ learns what the inputs of its layers look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_TEXTS = 64
_LENGTH = 40  # sampled tokens of each text
_SINGLE_TOKENS = 8  # random tokens that texts begin with, beside the prompts
_MEMORY = 1 << 30  # bytes of the texts' keys and values; longer or more prompts, or a larger model, get fewer texts


@dataclass(frozen=True, eq=False)
class CalibrationTexts:
    """Texts of one batch, padded on the left."""

    ids: Tensor  # batch x tokens
    real: Tensor  # batch x tokens, bool; False: padding


def calibration_texts(
    model: PreTrainedModel, prompts: Sequence[Tensor] = (), excluded: Sequence[int] = ()
) -> CalibrationTexts:
    """Samples of a model after random single tokens and after the given prompts, the same in each call.

    Tokens in `excluded` are neither drawn nor sampled. All texts are sampled together, because a streamed model reads
    its weights in each step. Of more prompts than there is memory for, the first are used."""
    without = set(excluded)
    config = model.config.get_text_config()
    tokens = [token for token in range(int(config.vocab_size)) if token not in without]
    drawn = torch.randint(0, len(tokens), (_SINGLE_TOKENS, 1), generator=torch.Generator().manual_seed(0))
    positions = int(getattr(config, "max_position_embeddings", None) or 2048)
    length = max(1, min(_LENGTH, positions // 2))
    starts = [*torch.tensor(tokens)[drawn], *(prompt[0, -(positions - length) :].cpu() for prompt in prompts)]
    longest = max(map(len, starts))
    most = max(_SINGLE_TOKENS, _MEMORY // ((longest + length) * kv_bytes(model)))
    rows = [starts[number % len(starts)] for number in range(min(max(_TEXTS, len(starts)), most))]
    ids = torch.stack([nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    real = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = model.generate(  # type: ignore[operator]
            ids.to(model.device),
            attention_mask=real.long().to(model.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length,
            min_new_tokens=length,
            pad_token_id=0,
            suppress_tokens=sorted(without) or None,
        )
    sampled = torch.ones(len(rows), found.shape[1] - longest, dtype=torch.bool)
    return CalibrationTexts(cast(Tensor, found), torch.cat((real, sampled), dim=1).to(model.device))


def sample_bytes(model: PreTrainedModel) -> int:
    """The memory that keys and values of the texts need with short prompts; the model may be without values."""
    return min(_MEMORY, _TEXTS * _LENGTH * kv_bytes(model))


def kv_bytes(model: PreTrainedModel) -> int:
    """The bytes of the keys and values of a token, in the model's type."""
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return 2 * int(config.num_hidden_layers) * kv_heads * size * model.dtype.itemsize
