"""Rows: adapters act on mask rows, tokens can have input rows of their own, and logits are computed for selected rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spaceport.graphs.decoder import decoder_of
from spaceport.graphs.gated import gate_model, trainable_parameters, uniform_rows
from spaceport.graphs.input_rows import InputRows, use_input_rows
from spaceport.graphs.low_rank import low_rank_linear
from spaceport.graphs.mask_gate import Gate, gate_of
from spaceport.graphs.output_rows import rows_selected
from spaceport.graphs.preloaded_slots import PreloadedSlots, add_preloaded_slots, slots_of
from support.gguf_files import random_model

MASKS = (600, 601)
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 97}
FORK, OTHER = 93, 12
MODELS = {
    "plain": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "scaled": lambda: GemmaForCausalLM(GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=16)),
}


def test_a_gate_is_open_for_mask_rows_while_its_model_runs() -> None:
    model = random_model("llama", tied=False)
    gate = gate_of(model, MASKS)
    seen: list[list[bool]] = []
    model.model.layers[1].register_forward_pre_hook(lambda *states: seen.append(gate.open_rows.flatten().tolist()))
    with torch.no_grad():
        model(torch.tensor([[3, 600, 5, 601]]))
        model(input_ids=torch.tensor([[601, 4, 6, 7]]))
    assert seen == [[False, True, False, True], [True, False, False, False]]
    with pytest.raises(RuntimeError, match="while its model does not run"):
        _ = gate.open_rows
    with pytest.raises(ValueError, match="was called without input_ids"):
        model(inputs_embeds=torch.zeros((1, 2, model.config.hidden_size)))


def test_an_adapter_and_slots_share_one_gate() -> None:
    model = random_model("llama", tied=False)
    gate_model(model, MASKS, 2, 4.0, ["q_proj"])
    config = model.config
    slots = torch.ones((config.num_hidden_layers, config.num_key_value_heads, 5, config.head_dim))
    add_preloaded_slots(model, MASKS, PreloadedSlots(slots, slots))
    gates = {id(module.gate) for module in model.modules() if isinstance(getattr(module, "gate", None), Gate)}
    assert len(gates) == 1
    assert [found.count for found in slots_of(model)] == [5] * 2
    decoder_of(model, "scatter", "plain")  # the comparison with the unmodified model


@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12)], ids=["rows", "batch"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_with_its_adapter_equals_the_sum_of_two_products(shape: tuple[int, ...], with_bias: bool) -> None:
    rng = torch.Generator().manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(size, generator=rng).requires_grad_()

    states, weight, a, b = made(*shape), made(7, 12).detach(), made(4, 12), made(7, 4)
    bias = made(7).detach() if with_bias else None
    low = nn.functional.linear(nn.functional.linear(states, a), b)
    expected = nn.functional.linear(states, weight, bias) + 1.5 * low
    found = low_rank_linear(states, weight, bias, a, b, 1.5)
    torch.testing.assert_close(found, expected)
    outer = torch.randn(expected.shape, generator=rng)
    gradients = (torch.autograd.grad((one * outer).sum(), (states, a, b)) for one in (found, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_matmuls_of_a_layer_with_its_adapter_run_in_the_type_of_the_frozen_weight() -> None:
    a, b = torch.randn(4, 12, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    states = torch.randn(5, 12, dtype=torch.bfloat16, requires_grad=True)
    found = low_rank_linear(states, torch.randn(7, 12, dtype=torch.bfloat16), None, a, b, 2.0)
    assert found.dtype == torch.bfloat16
    gradients = torch.autograd.grad(found.float().sum(), (states, a, b))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("masks", [True, False])
def test_uniform_rows_equal_rows_that_are_found_by_their_tokens(masks: bool) -> None:
    model = random_model("llama", tied=False)
    gate_model(model, MASKS, 4, 8.0, ["q_proj", "down_proj"])
    for parameter in trainable_parameters(model):
        nn.init.normal_(parameter, std=0.1)
    ids = torch.full((1, 6), MASKS[0]) if masks else torch.arange(6)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with uniform_rows(model, masks):
            torch.testing.assert_close(model(input_ids=ids).logits, expected)
        with uniform_rows(model, not masks):
            assert not torch.allclose(model(input_ids=ids).logits, expected)
        assert torch.equal(model(input_ids=ids).logits, expected)


@pytest.fixture(params=MODELS)
def tied(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = MODELS[request.param]().eval().requires_grad_(False)
    return made


def test_a_token_is_read_from_its_input_row_and_predicted_from_the_table(tied: PreTrainedModel) -> None:
    table = tied.get_input_embeddings().weight
    assert tied.get_output_embeddings().weight is table
    ids = torch.tensor([[5, FORK, 7], [5, OTHER, 7]])
    before = tied(input_ids=ids).logits
    use_input_rows(tied, InputRows((FORK,), table[[OTHER]].clone()))
    after = tied(input_ids=ids).logits
    torch.testing.assert_close(after[0], before[1])  # [Fork] now means what the other token means
    assert not torch.allclose(before[0, 1], before[1, 1])
    assert torch.equal(after[1], before[1])  # no other row and no logit changed


def test_input_rows_follow_the_type_of_the_model_and_are_not_stored_with_it(tied: PreTrainedModel) -> None:
    names = set(tied.state_dict())
    use_input_rows(tied, InputRows((FORK, OTHER), torch.randn(2, SIZES["hidden_size"])))
    assert set(tied.state_dict()) == names
    tied.to(torch.float16)
    assert tied(input_ids=torch.tensor([[FORK, OTHER, 3]])).logits.dtype == torch.float16


def test_selected_rows_have_the_same_logits_as_without_selection() -> None:
    model, ids, rows = random_model(), torch.arange(12)[None] + 3, [11, 0, 5]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with rows_selected(model, lambda hidden: hidden[:, rows]):
            selected = model(input_ids=ids).logits
        after = model(input_ids=ids).logits
    torch.testing.assert_close(selected, before[:, rows])
    assert torch.equal(after, before)
