"""Rows: adapters act on mask rows, heads add lines, tokens have input rows, and logits are compared and corrected."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spaceport.exporter.checkpoint import quiet_libraries
from spaceport.graphs.contract.signature import Signature, logit_rows
from spaceport.graphs.gated import gate_model, gate_of, low_rank_linear, trainable_parameters, uniform_rows
from spaceport.graphs.heads import Heads
from spaceport.graphs.mechanism import DraftCorrection, Factors, InputRows
from spaceport.graphs.traits import UnsupportedModel, require_equal_logits
from support.gguf_files import HIDDEN, random_model
from support.mask_rows import rows_batch, torch_engine
from support.published import random_heads, reference_lines

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
    InputRows((FORK,), table[[OTHER]].clone()).apply(tied)
    after = tied(input_ids=ids).logits
    torch.testing.assert_close(after[0], before[1])  # [Fork] now means what the other token means
    assert not torch.allclose(before[0, 1], before[1, 1])
    assert torch.equal(after[1], before[1])  # no other row and no logit changed


def test_input_rows_follow_the_type_of_the_model_and_are_not_stored_with_it(tied: PreTrainedModel) -> None:
    names = set(tied.state_dict())
    InputRows((FORK, OTHER), torch.randn(2, SIZES["hidden_size"])).apply(tied)
    assert set(tied.state_dict()) == names
    tied.to(torch.float16)
    assert tied(input_ids=torch.tensor([[FORK, OTHER, 3]])).logits.dtype == torch.float16


COUNT, BLOCKS = 3, 2


def test_the_lines_of_a_row_are_its_own_and_those_of_each_head() -> None:
    quiet_libraries()
    model, ids = random_model("llama", tied=False), [5, 99, 204, 17, 33, 8, 61]
    tensors = random_heads(COUNT, BLOCKS, HIDDEN, model.config.vocab_size)
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]  # behind the final norm
    plain = torch_engine(random_model("llama", tied=False))
    Heads(COUNT, BLOCKS, tensors).apply(model)
    heads = torch_engine(model)
    assert plain.signature.lines == 1
    assert heads.signature.lines == 1 + COUNT
    own, lines = (engine.run(rows_batch(ids))[0] for engine in (plain, heads))
    assert lines.shape == (len(ids) * (1 + COUNT), model.config.vocab_size)
    assert np.array_equal(lines[:: 1 + COUNT], own)
    for head, expected in enumerate(reference_lines(tensors, hidden, COUNT, BLOCKS), 1):
        assert np.abs(lines[head :: 1 + COUNT] - expected.numpy()).max() < 1e-4 * float(expected.abs().max())


def test_heads_count_as_logits_of_a_row() -> None:
    signature = Signature(2, 2, 8, 32_000, "float16", "scatter", lines=6)
    assert signature.row_logits == 6 * 32_000
    assert logit_rows(4096, 32_000) == 262
    assert logit_rows(4096, signature.row_logits) == 128
    assert signature.outputs[0].shape == ("B", "L", 32_000)


def test_the_tolerance_is_relative_to_the_largest_logit_and_no_logit_may_be_infinite() -> None:
    model = random_model()
    for largest in (0.5, 1.0, 50.0):
        expected = torch.linspace(-0.1, largest, 100)
        limit = 1e-4 * max(1.0, largest)
        require_equal_logits(model, "in another way", expected + 0.9 * limit, expected)
        for wrong in (-1.1 * limit, torch.nan, torch.inf):
            message = r"^the logits of LlamaForCausalLM in another way differ from .* \(expec"
            with pytest.raises(UnsupportedModel, match=message):
                require_equal_logits(model, "in another way", expected + wrong, expected)
    expected = torch.ones(3)
    require_equal_logits(random_model().bfloat16(), "in another way", expected + 0.09, expected)  # less precise


VOCAB, WIDTH, RANK = 50, 12, 5
TABLE = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1)) * 0.2


def factors() -> Factors:
    rng = torch.Generator().manual_seed(2)
    return Factors(*(torch.randn(WIDTH, RANK, generator=rng) for _ in range(2)))


def test_a_new_correction_changes_no_score_whatever_the_scale_of_the_embeddings() -> None:
    fresh = []
    for scale in (1.0, 1e-3, 100.0):
        torch.manual_seed(0)
        fresh.append(one := DraftCorrection(TABLE * scale, RANK))
        assert not one(TABLE, torch.arange(9), torch.arange(18).view(9, 2)).any()
        torch.testing.assert_close(one.before, fresh[0].before)
        size = float((TABLE * scale * one.scale @ one.before.detach()).std())
        assert 0.5 < size < 2  # neither vanishing nor large at the start


def test_corrections_are_products_of_the_vectors_in_the_tables() -> None:
    found = DraftCorrection(TABLE, RANK, factors())
    for given, kept in zip(factors().state().values(), found.factors().state().values(), strict=True):
        torch.testing.assert_close(kept, given)
    before, candidates = torch.tensor([3, 7]), torch.tensor([[1, 2, 3], [4, 9, 0]])
    left, right = found.factors().tables(TABLE)
    expected = torch.einsum("br,bcr->bc", left[before].float(), right[candidates].float())
    torch.testing.assert_close(found(TABLE, before, candidates), expected)


def test_the_loss_is_the_cross_entropy_over_the_candidates() -> None:
    found = DraftCorrection(TABLE, RANK, factors())
    before, candidates = torch.tensor([3, 7, 8]), torch.tensor([[1, 2, 3], [4, 9, 0], [4, 9, 0]])
    scores, targets = torch.randn(3, 3), torch.tensor([2, 9, 5])
    losses, correct = found.losses(TABLE, before, candidates, scores, targets)
    corrected = scores + found(TABLE, before, candidates)
    expected = torch.nn.functional.cross_entropy(corrected[:2], torch.tensor([1, 1]), reduction="none")
    torch.testing.assert_close(losses[:2], expected)
    assert losses[2] == 0  # the target is not among the candidates
    assert correct.tolist() == [*(corrected[:2].argmax(-1) == 1).float().tolist(), 0]
