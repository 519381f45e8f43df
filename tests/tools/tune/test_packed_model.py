"""Packed model: every exportable family trains on packed rows, in one pass or over a frozen base; others are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

from spaceport.graphs.contract.draft_correction import CANDIDATES
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.correction import DraftCorrection
from spaceport.graphs.traits import UnsupportedModel
from spaceport.tools.tune.batches import TrainingBatches
from spaceport.tools.tune.frozen_base import frozen_base_model_of
from spaceport.tools.tune.head_loss import head_loss
from spaceport.tools.tune.methods import apply_method
from spaceport.tools.tune.packed_model import CORRECTED_LOSS, COUNT, LOSS, PackedModel, packed_model_of, reached, run
from spaceport.tools.tune.packing import MaskGroup, PackedBatch, anchors, collate, pack, successors
from spaceport.tools.tune.samples import Prepared, Sample
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.token_embeddings import train_token_embeddings
from spaceport.tools.tune.training import Training
from support.families import FAMILIES, NOT_DECODER, REFUSED, Family, Refused, build

MASK = 96  # the last token of the tiny vocabulary


def text(length: int, seed: int, line: int = 1) -> Sample:
    ids = np.random.default_rng(seed).integers(3, MASK, length)
    return Sample(line, ids, np.arange(length) - 1, np.arange(length) > 0)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_family_trains_on_packed_rows(family: Family) -> None:
    model = build(family)  # packed_model_of proves its forward pass; windows are shorter than the text
    sample = text(40, 1)
    rows = [pack(sample, [MaskGroup(anchor, 3) for anchor in (4, 20, 31)], (MASK,) * 3), pack(text(9, 2), (), ())]
    packed_model = packed_model_of(model, 3)
    sums = run(packed_model, collate(rows))
    sums[LOSS].sum().backward()  # type: ignore[no-untyped-call]
    assert sums[COUNT].tolist() == [39 + 8, 3, 3, 3]
    assert torch.isfinite(sums).all()
    dead = [
        name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.isfinite().all()
    ]
    assert dead == []


def test_a_mask_slot_is_reached_if_all_of_its_group_up_to_it_are_correct() -> None:
    rng = np.random.default_rng(0)
    slots: list[int] = []
    correct: list[float] = []
    expected: list[float] = []
    for _ in range(200):
        texts, depth = int(rng.integers(3)), int(rng.integers(1, 5))
        group = [float(right) for right in rng.random(depth) < 0.7]
        slots += [0] * texts + [*range(1, depth + 1)]
        correct += [*rng.integers(0, 2, texts).astype(float), *group]
        expected += [0.0] * texts + [float(all(group[:count])) for count in range(1, depth + 1)]
    assert reached(torch.tensor(correct), torch.tensor(slots)).tolist() == expected


OPENED = [refused for refused in REFUSED if refused.reason != NOT_DECODER]  # the others are refused as checkpoints


@pytest.mark.parametrize("refused", OPENED, ids=str)
def test_an_unsupported_family_is_refused_with_a_reason(refused: Refused) -> None:
    with pytest.raises(UnsupportedModel, match=refused.reason):
        packed_model_of(build(refused.family), 3)


def test_a_sliding_window_applies_to_positions_of_packed_rows() -> None:
    """A mask group sees the tokens up to its anchor within the sliding window, and no others."""
    family = next(family for family in FAMILIES if family.name == "mistral")
    sample = text(40, 1)
    row = pack(sample, [MaskGroup(30, 2)], (MASK,) * 2)
    batch = collate([row])
    wanted = torch.zeros_like(batch.ids, dtype=torch.bool)
    wanted[0, -2:] = True
    packed_model = packed_model_of(build(family), 3)

    def logits(changed: int) -> torch.Tensor:
        ids = batch.ids.clone()
        ids[0, changed] = 3 if ids[0, changed] != 3 else 4
        with torch.no_grad():
            return packed_model.logits(ids, batch.positions, batch.visible, wanted)

    layers, window = 2, 16
    reach = 31 - layers * (window - 1)  # of mask slot 1, which stands at position 31
    same, other = logits(38), logits(reach)  # 38 lies behind the anchor
    assert torch.equal(same, logits(39))
    assert not torch.allclose(other[0], same[0], atol=1e-6)
    assert torch.equal(logits(reach - 1)[0], same[0])


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["tied", "untied"])
def test_few_texts_are_memorized_in_every_mask_slot(tied: bool) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=97, **sizes, num_hidden_layers=2, initializer_range=0.05, tie_word_embeddings=tied)
    samples = [text(16, seed, line=seed) for seed in range(8)]
    settings = TrainingSettings(
        mask_slots=4, anchors=6, batch_size=8, micro_batch_size=8, learning_rate=6e-3, epochs=120
    )
    batches = TrainingBatches(Prepared(whole=samples), settings, (MASK,))
    packed_model = packed_model_of(LlamaForCausalLM(config), settings.slots)
    training = Training(Accelerator(cpu=True), packed_model, batches, settings)
    while training.step < batches.steps:
        training.run_step()
    rows = []
    for sample in samples:  # every anchor whose prefix distinguishes the texts
        groups = [MaskGroup(anchor, 4) for anchor in anchors(successors(sample)).tolist() if anchor >= 1]
        rows.append(pack(sample, groups, (MASK,) * 4))
    found = training.evaluate(rows)
    assert min(found.mask_accuracies) > 0.95, found
    assert found.accuracies[0] > 0.9


# A frozen base

UNGATED = {"gpt2"}  # projections are no linear modules


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
MODELS = {
    "padding": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=90)),
    "scaled": lambda: GemmaForCausalLM(GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=16)),  # its embeddings
}


@pytest.mark.parametrize("name", MODELS)
def test_mask_embeddings_are_written_to_the_table_when_they_are_merged(name: str) -> None:
    model = MODELS[name]().requires_grad_(False)
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
