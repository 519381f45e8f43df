"""Input rows: a token with an input row of its own is read from it, and its logit is computed from the table."""

from __future__ import annotations

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spaceport.graphs.input_rows import InputRows, use_input_rows

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 97}
FORK, OTHER = 93, 12
MODELS = {
    "plain": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "scaled": lambda: GemmaForCausalLM(GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=16)),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = MODELS[request.param]().eval().requires_grad_(False)
    return made


def test_a_token_is_read_from_its_row_and_predicted_from_the_table(model: PreTrainedModel) -> None:
    table = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is table  # tied
    ids = torch.tensor([[5, FORK, 7], [5, OTHER, 7]])
    before = model(input_ids=ids).logits
    use_input_rows(model, InputRows((FORK,), table[[OTHER]].clone()))
    after = model(input_ids=ids).logits
    torch.testing.assert_close(after[0], before[1])  # [Fork] now means what the other token means
    assert not torch.allclose(before[0, 1], before[1, 1])
    assert torch.equal(after[1], before[1])  # no other row and no logit changed


def test_rows_follow_the_type_of_the_model_and_are_not_stored_with_it(model: PreTrainedModel) -> None:
    names = set(model.state_dict())
    use_input_rows(model, InputRows((FORK, OTHER), torch.randn(2, SIZES["hidden_size"])))
    assert set(model.state_dict()) == names
    model.to(torch.float16)
    assert model(input_ids=torch.tensor([[FORK, OTHER, 3]])).logits.dtype == torch.float16
