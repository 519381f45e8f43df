"""Model comparison: differences from rounding pass; larger ones and non-finite logits are refused."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from spaceport.graphs.model_comparison import comparison_ids, require_equal_logits, unmodified_logits
from spaceport.graphs.traits import UnsupportedModel, dtype_name, probe
from support.paths import TINY


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return cast(PreTrainedModel, AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval())


@pytest.mark.parametrize("largest", [0.5, 1.0, 50.0])
def test_the_tolerance_is_relative_to_the_largest_logit(model: PreTrainedModel, largest: float) -> None:
    expected = torch.linspace(-0.1, largest, 100)
    limit = 1e-4 * max(1.0, largest)
    require_equal_logits(model, "in another way", expected + 0.9 * limit, expected)
    with pytest.raises(
        UnsupportedModel, match=r"^the logits of LlamaForCausalLM in another way differ from .* \(expected at most "
    ):
        require_equal_logits(model, "in another way", expected - 1.1 * limit, expected)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_logit_that_is_not_finite_is_refused(model: PreTrainedModel, wrong: float) -> None:
    expected = torch.ones(3)
    with pytest.raises(UnsupportedModel):
        require_equal_logits(model, "in another way", torch.tensor([1.0, wrong, 1.0]), expected)


def test_a_type_with_less_precision_has_a_larger_tolerance(model: PreTrainedModel) -> None:
    expected = torch.ones(3)
    assert dtype_name(model) == "float32"
    try:
        model.bfloat16()
        require_equal_logits(model, "in another way", expected + 0.09, expected)
    finally:
        model.float()
    with pytest.raises(UnsupportedModel):
        require_equal_logits(model, "in another way", expected + 0.09, expected)


def test_the_compared_text_is_the_same_each_time(model: PreTrainedModel) -> None:
    with torch.no_grad():
        traits = probe(model)
        ids, again = comparison_ids(model, traits), comparison_ids(model, traits)
        assert torch.equal(ids, again)
        assert torch.equal(unmodified_logits(model, ids, traits), unmodified_logits(model, again, traits))
