"""Model comparison: compare the logits of a wrapped model with those of the unmodified model before it is used."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spaceport.graphs.traits import Traits, UnsupportedModel, class_name, dtype_name

# Largest difference that rounding explains, relative to the largest logit; measured over the model families of the
# tests: up to 5e-3 in float16 and 4e-2 in bfloat16. contract.tolerance.TOLERANCE is another bound: it compares engines
# that run the same graph, this one compares the wrapped model with the unmodified model.
_TOLERANCE = {"float32": 1e-4, "float16": 5e-2, "bfloat16": 1e-1}
_ROWS = 24
_WINDOW = 512  # the compared text is longer than the attention window only up to this window size


def comparison_ids(model: PreTrainedModel, traits: Traits, excluded: Collection[int] = ()) -> Tensor:
    """Token ids of the compared text without the excluded ones, 1 x tokens.

    The text is longer than the model's window if that is at most 512."""
    rows = _ROWS + (traits.window if traits.window and traits.window <= _WINDOW else 0)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, traits.vocab_size, (1, min(rows, traits.max_positions)), generator=generator)
    if excluded:
        other = next(token for token in range(traits.vocab_size) if token not in excluded)
        ids = torch.where(torch.isin(ids, torch.tensor([*excluded])), other, ids)
    return ids.to(model.device)


def unmodified_logits(model: PreTrainedModel, ids: Tensor, traits: Traits) -> Tensor:
    """The logits of a text with the model's own attention."""
    if traits.attention_hook == "interface":
        model.set_attn_implementation("eager")
    return cast(Tensor, model(input_ids=ids, use_cache=False).logits.float())


def require_equal_logits(model: PreTrainedModel, how: str, logits: Tensor, expected: Tensor) -> None:
    """Raise unless the logits equal the expected ones up to rounding; `how` names the compared way to run the model."""
    difference = float((logits - expected).abs().max())
    allowed = _TOLERANCE.get(dtype_name(model), _TOLERANCE["float16"]) * max(1.0, float(expected.abs().max()))
    if not difference <= allowed:
        raise UnsupportedModel(
            f"the logits of {class_name(model)} {how} differ from the unmodified model's by {difference:.3g} (expected at "
            f"most {allowed:.3g}): its attention depends on more than positions and visibility"
        )
