"""Packed model: every exportable family trains on packed rows; others are refused before the first step."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from spaceport.graphs.traits import UnsupportedModel
from spaceport.tools.tune.batches import TrainingBatches
from spaceport.tools.tune.packed_model import COUNT, LOSS, packed_model_of, reached, run
from spaceport.tools.tune.packing import MaskGroup, anchors, collate, pack, successors
from spaceport.tools.tune.samples import Prepared, Sample
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.training import Training
from support.families import FAMILIES, NOT_DECODER, REFUSED, Family, Refused, build

MASK = 96  # the last token of the tiny vocabulary


def text(length: int, seed: int, line: int = 1, most: int = MASK) -> Sample:
    ids = np.random.default_rng(seed).integers(3, most, length)
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
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.05,
        tie_word_embeddings=tied,
    )
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
