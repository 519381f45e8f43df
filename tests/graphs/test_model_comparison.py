"""Model comparison: differences from rounding pass; larger ones and non-finite logits are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from spaceport.graphs.model_comparison import comparison_ids, require_equal_logits, unmodified_logits
from spaceport.graphs.traits import UnsupportedModel, probe
from support.gguf_files import random_model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model()


@pytest.mark.parametrize("largest", [0.5, 1.0, 50.0])
def test_the_tolerance_is_relative_to_the_largest_logit(model: PreTrainedModel, largest: float) -> None:
    expected = torch.linspace(-0.1, largest, 100)
    limit = 1e-4 * max(1.0, largest)
    require_equal_logits(model, "in another way", expected + 0.9 * limit, expected)
    with pytest.raises(
        UnsupportedModel, match=r"^the logits of LlamaForCausalLM in another way differ from .* \(expec"
    ):
        require_equal_logits(model, "in another way", expected - 1.1 * limit, expected)


def test_a_type_with_less_precision_has_a_larger_tolerance_and_no_logit_may_be_infinite() -> None:
    expected = torch.ones(3)
    require_equal_logits(random_model().bfloat16(), "in another way", expected + 0.09, expected)
    for wrong in (expected + 0.09, torch.tensor([1.0, torch.nan, 1.0]), torch.tensor([1.0, torch.inf, 1.0])):
        with pytest.raises(UnsupportedModel):
            require_equal_logits(random_model(), "in another way", wrong, expected)


def test_the_compared_text_is_the_same_each_time(model: PreTrainedModel) -> None:
    with torch.no_grad():
        traits = probe(model)
        ids, again = comparison_ids(model, traits), comparison_ids(model, traits)
        assert torch.equal(ids, again)
        assert torch.equal(unmodified_logits(model, ids, traits), unmodified_logits(model, again, traits))
