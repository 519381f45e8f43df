"""Frozen base: two passes give the mask rows' losses and gradients of one pass, in every family."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

from spaceport.graphs.contract.draft_correction import CANDIDATES
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.correction import DraftCorrection
from spaceport.graphs.traits import UnsupportedModel
from spaceport.tools.tune.frozen_base import frozen_base_model_of
from spaceport.tools.tune.head_loss import head_loss
from spaceport.tools.tune.methods import apply_method
from spaceport.tools.tune.packed_model import CORRECTED_LOSS, COUNT, LOSS, PackedModel, packed_model_of, run
from spaceport.tools.tune.packing import MaskGroup, PackedBatch, collate, pack
from spaceport.tools.tune.samples import Sample
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.token_embeddings import train_token_embeddings
from support.families import FAMILIES, Family, build

MASK = 96  # the last token of the tiny vocabulary
UNGATED = {"gpt2"}  # projections are no linear modules


def text(length: int, seed: int) -> Sample:
    ids = np.random.default_rng(seed).integers(3, MASK, length)
    return Sample(1, ids, np.arange(length) - 1, np.arange(length) > 0)


def batch() -> PackedBatch:
    masks = (MASK,) * 3
    rows = [pack(text(40, 1), [MaskGroup(anchor, 3) for anchor in (4, 20, 31)], masks)]
    return collate([*rows, pack(text(9, 2), [MaskGroup(2, 2)], masks), pack(text(12, 3), (), ())])


def gradients(packed: PackedModel, trained: list[torch.nn.Parameter]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    for parameter in trained:
        parameter.grad = None
    packed.train()
    packed.model.eval()  # without dropout
    sums = run(packed, batch())
    (sums[LOSS, 1:].sum() + sums[CORRECTED_LOSS].sum()).backward()  # type: ignore[no-untyped-call]
    return sums.detach(), [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in trained]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name not in UNGATED], ids=str)
def test_two_passes_give_the_losses_and_gradients_of_one_pass(family: Family) -> None:
    torch.manual_seed(0)
    model = build(family)
    one = packed_model_of(model, 3)
    try:
        apply_method(model, TrainingSettings(method="gated-lora", rank=4), TokenIds(mask=(MASK,)))
    except UnsupportedModel:  # experts and other matrices that cannot have adapters
        assert family.name not in ("llama", "gemma2", "qwen3", "glm", "falcon", "opt")
        return
    correction = DraftCorrection(model.get_input_embeddings().weight, 4)
    two = frozen_base_model_of(one)
    one.correction = two.correction = correction
    trained = [parameter for parameter in one.parameters() if parameter.requires_grad]
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.05)
    expected_sums, expected = gradients(one, trained)
    sums, found = gradients(two, trained)
    assert torch.equal(sums[COUNT, 1:], expected_sums[COUNT, 1:])
    assert not sums[:, 0].any()
    for line in (LOSS, CORRECTED_LOSS):
        assert sums[line].any()
        torch.testing.assert_close(sums[line, 1:], expected_sums[line, 1:], rtol=1e-4, atol=1e-4)
    assert any(each.abs().max() > 1e-3 for each in expected)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-4 * max(1.0, float(other.abs().max())))


def test_validation_measures_the_next_token_too() -> None:
    family = next(family for family in FAMILIES if family.name == "llama")
    one = packed_model_of(build(family), 3)
    two = frozen_base_model_of(one)
    two.eval()
    with torch.no_grad():
        assert torch.equal(run(two, batch()), run(one, batch()))
    assert run(two, batch())[COUNT, 0] > 0


@pytest.mark.parametrize("rows", [1, 127, 128, 300])
def test_the_loss_in_chunks_is_cross_entropy_with_its_gradient(rows: int) -> None:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 24, generator=rng, requires_grad=True)
    weight, bias = torch.randn(61, 24, generator=rng), torch.randn(61, generator=rng)
    targets, outer = torch.randint(0, 61, (rows,), generator=rng), torch.rand(rows, generator=rng)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    (gradient,) = torch.autograd.grad((expected * outer).sum(), hidden)
    losses, correct, candidates, scores = head_loss(hidden, weight, bias, targets, CANDIDATES)
    torch.testing.assert_close(losses, expected)
    assert torch.equal(correct, (logits.argmax(-1) == targets).float())
    torch.testing.assert_close(scores, logits.topk(CANDIDATES).values)
    torch.testing.assert_close(logits.gather(1, candidates), scores)
    torch.testing.assert_close(torch.autograd.grad((losses * outer).sum(), hidden)[0], gradient)


def test_logits_that_are_scaled_or_capped_behind_the_head_are_not_taken_from_it() -> None:
    plain = {family.name: frozen_base_model_of(packed_model_of(build(family), 3)).plain_head for family in FAMILIES}
    assert plain["llama"]
    assert not plain["gemma2"]  # caps its logits


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 97}


@pytest.mark.parametrize(
    "model",
    [
        LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=90)),
        GemmaForCausalLM(GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=16)),  # scales its embeddings
    ],
    ids=["padding", "scaled"],
)
def test_mask_embeddings_are_written_to_the_table_when_they_are_merged(model: LlamaForCausalLM) -> None:
    model.requires_grad_(False)
    ids = torch.tensor([[5, MASK, 7, 95, MASK]])
    before = model(input_ids=ids).logits
    merge = train_token_embeddings(model, [MASK, 95])
    assert torch.equal(model(input_ids=ids).logits, before)
    (rows,) = (parameter for parameter in model.parameters() if parameter.requires_grad)
    with torch.no_grad():
        rows += 1.0
    changed = model.base_model(input_ids=ids)[0]
    merge()
    assert torch.allclose(model.base_model(input_ids=ids)[0], changed, atol=1e-5)
    assert not torch.equal(changed, before)
    assert "trained_rows" not in " ".join(model.state_dict())
