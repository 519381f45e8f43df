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
    its weights in each step."""
    without = set(excluded)
    config = model.config.get_text_config()
    tokens = [token for token in range(int(config.vocab_size)) if token not in without]
    drawn = torch.randint(0, len(tokens), (_SINGLE_TOKENS, 1), generator=torch.Generator().manual_seed(0))
    positions = int(getattr(config, "max_position_embeddings", None) or 2048)
    length = max(1, min(_LENGTH, positions // 2))
    starts = [*torch.tensor(tokens)[drawn], *(prompt[0, -(positions - length) :].cpu() for prompt in prompts)]
    rows = [starts[number % len(starts)] for number in range(max(_TEXTS, len(starts)))]
    longest = max(map(len, rows))
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
