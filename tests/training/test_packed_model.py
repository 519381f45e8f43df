"""Packed model: every exportable family trains on packed rows, in one pass or over a frozen base, with more tokens."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.graphs.contract.draft_methods import CANDIDATES
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.mechanism import DraftCorrection
from spaceport.graphs.traits import UnsupportedModel
from spaceport.training import packed_model
from spaceport.training.methods import apply_method, train_token_embeddings
from spaceport.training.packed_model import (
    CORRECTED_LOSS,
    COUNT,
    LOSS,
    PackedModel,
    frozen_base_model_of,
    head_loss,
    packed_model_of,
    reached,
    run,
)
from spaceport.training.packing import MaskGroup, PackedBatch, collate, pack
from spaceport.training.samples import Sample
from spaceport.training.settings import DEFAULT, TrainingSettings
from spaceport.training.tunable_model import add_tokens, embedding_rows, open_tunable_model
from support.families import FAMILIES, NOT_DECODER, REFUSED, VOCAB, Family, Refused, build
from support.paths import TINY

MASK = 96  # the last token of the tiny vocabulary


def text(length: int, seed: int) -> Sample:
    ids = np.random.default_rng(seed).integers(3, MASK, length)
    return Sample(1, ids, np.arange(length) - 1, np.arange(length) > 0)


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
def test_two_passes_give_the_losses_and_gradients_of_one_pass(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_model, "_ATTENDING", 4)  # mask rows that attend together: 11 in three parts
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


@pytest.mark.parametrize("frozen", [False, True], ids=("whole", "frozen base"))
def test_a_token_that_is_never_generated_has_no_loss(frozen: bool) -> None:
    model = build(FAMILIES[0])
    packed = packed_model_of(model, 2)
    packed = frozen_base_model_of(packed) if frozen else packed
    batch = collate([pack(text(20, 1), [MaskGroup(8, 2)], (MASK,) * 2)])
    losses = run(packed, batch)[LOSS]
    (first, second) = batch.targets[batch.mask_slots > 0].tolist()
    packed.forbidden = (first,)
    found = run(packed, batch)[LOSS]
    assert found[1] == 0 < losses[1]
    assert found[2] <= losses[2]  # another token has lost its probability
    assert second != first


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # which scales its embeddings
def test_mask_embeddings_are_written_to_the_table_when_they_are_merged(name: str) -> None:
    model = build(next(family for family in FAMILIES if family.name == name)).eval().requires_grad_(False)
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


NAMES = ("[M]", "[Fork]", "[Child]")


def tokenizer_of(size: int) -> Any:
    """A character tokenizer with a given number of tokens."""
    pieces = {"</s>": 0, "<unk>": 1, **{chr(0x100 + number): number for number in range(2, size)}}
    backend = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def model_of(name: str, **options: Any) -> PreTrainedModel:
    family = next(family for family in FAMILIES if family.name == name)
    return build(replace(family, options={**family.options, **options}))


TABLES = {"tied": ("llama", True, 1), "untied": ("llama", False, 2), "with a bias of its head": ("phi", False, 3)}


@pytest.mark.parametrize("kind", TABLES)
def test_a_vocabulary_grows_to_a_multiple_of_64_with_mean_rows(kind: str) -> None:
    name, tied, tables = TABLES[kind]
    model, tokenizer = model_of(name, tie_word_embeddings=tied), tokenizer_of(VOCAB)
    before = [rows.detach().clone() for rows in embedding_rows(model)]
    assert add_tokens(tokenizer, model, NAMES) == [VOCAB, VOCAB + 1, VOCAB + 2]
    after = embedding_rows(model)
    assert len(before) == len(after) == tables
    assert model.config.vocab_size == 128
    for old, new in zip(before, after, strict=True):
        assert new.shape == (128, *old.shape[1:])
        assert torch.equal(new[:VOCAB], old)
        assert torch.equal(new[VOCAB:], old.mean(0).expand_as(new[VOCAB:]))
    ids = torch.tensor([[3, 4, VOCAB]])
    assert model(ids).logits.shape == (1, 3, 128)


def test_unused_rows_are_used_before_the_vocabulary_grows_and_existing_tokens_keep_theirs() -> None:
    model, tokenizer = model_of("llama"), tokenizer_of(VOCAB - 3)
    before = embedding_rows(model)[0].detach().clone()
    for new in (before[: VOCAB - 3].mean(0).expand(3, -1), torch.ones(3, before.shape[1])):
        assert add_tokens(tokenizer, model, NAMES) == [VOCAB - 3, VOCAB - 2, VOCAB - 1]
        assert add_tokens(tokenizer, model, ()) == []
        rows = embedding_rows(model)[0]
        assert torch.equal(rows, torch.cat((before[: VOCAB - 3], new)))
        rows.data[VOCAB - 3 :] = 1.0  # as training changes them
    with pytest.raises(InputFault, match="'ĥ' is an ordinary token of the tokenizer already: expected a name that"):
        add_tokens(tokenizer, model, ("[N]", chr(0x125)))
    assert len(tokenizer) == model.config.vocab_size == VOCAB


def test_tokenizer_truncation_and_padding_are_disabled(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "base")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "import json and answer everything that is asked"
    expected = backend.encode(text, add_special_tokens=False).ids
    backend.enable_truncation(8)
    backend.enable_padding(length=200)
    backend.save(str(folder / "tokenizer.json"))
    tunable = open_tunable_model(open_checkpoint(folder, TokenFlags()), TrainingSettings(), DEFAULT)
    assert len(expected) > 8
    assert tunable.encoder.encode(text) == expected
