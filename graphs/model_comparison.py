"""Proof: a rewritten model's logits compared with those of the unmodified model, before anything is made of it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spaceport.graphs.traits import Traits, UnsupportedModel, dtype_name, name_of

# Largest difference to the unmodified model, relative to its largest logit, that rounding explains; over the families of
# the tests it is up to 5e-3 in float16 and 4e-2 in bfloat16. Not contract.tolerance.TOLERANCE: that bounds engines that run
# the same graph, this the rewritten model against the model itself.
_TOLERANCE = {"float32": 1e-4, "float16": 5e-2, "bfloat16": 1e-1}
_ROWS = 24
_WINDOW = 512  # windows longer than this are trusted to be the same rule as shorter ones


def comparison_ids(model: PreTrainedModel, traits: Traits) -> Tensor:
    """A text to prove a rewritten model with: longer than the model's window, where that is short."""
    rows = _ROWS + (traits.window if traits.window and traits.window <= _WINDOW else 0)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, traits.vocab_size, (1, min(rows, traits.max_positions)), generator=generator)
    return ids.to(model.device)


def unmodified_logits(model: PreTrainedModel, ids: Tensor, traits: Traits) -> Tensor:
    """The logits of a text by the model's own attention."""
    if traits.attention_hook == "interface":
        model.set_attn_implementation("eager")
    return cast(Tensor, model(input_ids=ids, use_cache=False).logits.float())


def require_equal_logits(model: PreTrainedModel, how: str, logits: Tensor, expected: Tensor) -> None:
    """Raise unless the logits of a model that is run in another way are those that were expected, but for rounding."""
    difference = float((logits - expected).abs().max())
    allowed = _TOLERANCE.get(dtype_name(model), _TOLERANCE["float16"]) * max(1.0, float(expected.abs().max()))
    if not difference <= allowed:
        raise UnsupportedModel(
            f"{name_of(model)} {how} differs from the model by {difference:.3g} in its logits (at most "
            f"{allowed:.3g} expected): something in its attention depends on more than positions and visibility"
        )
