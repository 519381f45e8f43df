"""Low rank: one function gives the output and the gradients of a linear layer plus its adapter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spaceport.graphs.gated import gate_model, trainable_parameters, uniform_rows
from spaceport.graphs.low_rank import low_rank_linear
from support.families import FAMILIES, build

MASK = 96


@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12)], ids=["rows", "batch"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_one_function_equals_the_sum_of_two_products(shape: tuple[int, ...], with_bias: bool) -> None:
    rng = torch.Generator().manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(size, generator=rng).requires_grad_()

    states, weight, a, b = made(*shape), made(7, 12).detach(), made(4, 12), made(7, 4)
    bias = made(7).detach() if with_bias else None
    expected = nn.functional.linear(states, weight, bias) + 1.5 * nn.functional.linear(
        nn.functional.linear(states, a), b
    )
    found = low_rank_linear(states, weight, bias, a, b, 1.5)
    torch.testing.assert_close(found, expected)
    outer = torch.randn(expected.shape, generator=rng)
    for one, other in zip(
        torch.autograd.grad((found * outer).sum(), (states, a, b)),
        torch.autograd.grad((expected * outer).sum(), (states, a, b)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_matmuls_run_in_the_type_of_the_frozen_weight() -> None:
    a, b = torch.randn(4, 12, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    states = torch.randn(5, 12, dtype=torch.bfloat16, requires_grad=True)
    found = low_rank_linear(states, torch.randn(7, 12, dtype=torch.bfloat16), None, a, b, 2.0)
    assert found.dtype == torch.bfloat16
    gradients = torch.autograd.grad(found.float().sum(), (states, a, b))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("masks", [True, False])
def test_uniform_rows_equal_rows_that_are_found_by_their_tokens(masks: bool) -> None:
    model = build(next(family for family in FAMILIES if family.name == "llama"))
    gate_model(model, [MASK], 4, 8.0, ["q_proj", "down_proj"])
    for parameter in trainable_parameters(model):
        nn.init.normal_(parameter, std=0.1)
    ids = torch.full((1, 6), MASK) if masks else torch.arange(6)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with uniform_rows(model, masks):
            torch.testing.assert_close(model(input_ids=ids).logits, expected)
        with uniform_rows(model, not masks):
            assert not torch.allclose(model(input_ids=ids).logits, expected)
        assert torch.equal(model(input_ids=ids).logits, expected)
