"""Trainee: every family that can be exported learns over packed rows; the others are refused before a step."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from spaceport.graphs.traits import UnsupportedModel
from spaceport.tools.tune.course import Course
from spaceport.tools.tune.packing import MaskGroup, anchors, collate, pack, successors
from spaceport.tools.tune.samples import Prepared, Sample
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.trainee import COUNT, LOSS, run, trainee_of
from spaceport.tools.tune.training import Training
from support.families import FAMILIES, NOT_DECODER, REFUSED, Family, Refused, build

MASK = 96  # the last token of the tiny vocabulary


def text(length: int, seed: int, line: int = 1, most: int = MASK) -> Sample:
    ids = np.random.default_rng(seed).integers(3, most, length)
    return Sample(line, ids, np.arange(length) - 1, np.arange(length) > 0)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_family_learns_over_packed_rows(family: Family) -> None:
    model = build(family)  # trainee_of proves its forward pass; windows are shorter than the text
    sample = text(40, 1)
    rows = [pack(sample, [MaskGroup(place, 3) for place in (4, 20, 31)], (MASK,) * 3), pack(text(9, 2), (), ())]
    trainee = trainee_of(model, 3)
    sums = run(trainee, collate(rows))
    sums[LOSS].sum().backward()  # type: ignore[no-untyped-call]
    assert sums[COUNT].tolist() == [39 + 8, 3, 3, 3]
    assert torch.isfinite(sums).all()
    dead = [
        name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.isfinite().all()
    ]
    assert dead == []


OPENED = [refused for refused in REFUSED if refused.reason != NOT_DECODER]  # the others are refused as checkpoints


@pytest.mark.parametrize("refused", OPENED, ids=str)
def test_a_family_that_cannot_is_refused_with_a_reason(refused: Refused) -> None:
    with pytest.raises(UnsupportedModel, match=refused.reason):
        trainee_of(build(refused.family), 3)


def test_a_window_holds_for_packed_rows_by_position() -> None:
    """A mask group at the end of the row sees the tokens before its anchor that its window reaches, and no others."""
    family = next(family for family in FAMILIES if family.name == "mistral")
    sample = text(40, 1)
    row = pack(sample, [MaskGroup(30, 2)], (MASK,) * 2)
    batch = collate([row])
    wanted = torch.zeros_like(batch.ids, dtype=torch.bool)
    wanted[0, -2:] = True
    trainee = trainee_of(build(family), 3)

    def logits(changed: int) -> torch.Tensor:
        ids = batch.ids.clone()
        ids[0, changed] = 3 if ids[0, changed] != 3 else 4
        with torch.no_grad():
            return trainee.logits(ids, batch.positions, batch.visible, wanted)

    layers, window = 2, 16
    reach = 31 - layers * (window - 1)  # of mask slot 1, which stands at position 31
    same, other = logits(38), logits(reach)  # 38 lies behind the anchor
    assert torch.equal(same, logits(39))
    assert not torch.allclose(other[0], same[0], atol=1e-6)
    assert torch.equal(logits(reach - 1)[0], same[0])


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["tied", "untied"])
def test_twenty_texts_are_learned_by_heart_in_every_slot(tied: bool) -> None:
    """Within a minute: what is learned is right in more than 95 of 100 places, whatever the slot."""
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
    samples = [text(24, seed, line=seed) for seed in range(20)]
    settings = TrainingSettings(
        "sar", mask_slots=4, anchors=8, batch=20, micro_batch=20, rate=6e-3, epochs=220, warmup=0.1, betas=(0.9, 0.98)
    )
    course = Course(Prepared(whole=samples), settings, (MASK,))
    training = Training(Accelerator(cpu=True), trainee_of(LlamaForCausalLM(config), settings.slots), course, settings)
    while training.step < course.steps:
        training.learn()
    rows = []
    for sample in samples:  # every anchor whose prefix tells the texts apart
        following = successors(sample)
        groups = [MaskGroup(anchor, 4) for anchor in anchors(following).tolist() if anchor >= 1]
        rows.append(pack(sample, groups, (MASK,) * 4))
    found = training.evaluate(rows)
    assert min(found.mask_accuracies) > 0.95, found
    assert found.accuracies[0] > 0.9
