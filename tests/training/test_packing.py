"""Packed training: rows have the positions, visibility and targets of decoding, and every family trains on them."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.graphs.contract.draft_methods import CANDIDATES, MaskLayout
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.mechanism import DraftCorrection, Factors
from spaceport.graphs.traits import UnsupportedModel
from spaceport.runtime.decode import draft as drafts
from spaceport.runtime.decode.plan import mark_visible, plan_thread
from spaceport.runtime.decode.sequence import root_sequence
from spaceport.training import packed_model, packing
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
from spaceport.training.packing import (
    MaskGroup,
    PackedBatch,
    TrainingBatches,
    anchors,
    collate,
    pack,
    require_forks,
    sample_groups,
    successors,
)
from spaceport.training.samples import NO_PARENT, Prepared, Sample
from spaceport.training.settings import DEFAULT, TrainingSettings
from spaceport.training.tunable_model import add_tokens, embedding_rows, open_tunable_model
from support.families import FAMILIES, NOT_DECODER, REFUSED, VOCAB, Family, Refused, build
from support.hash_engine import LAYOUTS
from support.paths import TINY

M, FORK, CHILD = 90, 91, 92
FAMILY = {family.name: family for family in FAMILIES}


def chain(prompt: Sequence[int], answer: Sequence[int]) -> Sample:
    ids = [*prompt, *answer]
    learned = np.array([False] * len(prompt) + [True] * len(answer))
    return Sample(1, np.array(ids), np.arange(len(ids)) - 1, learned)


def forked() -> Sample:
    """`50 | h1 F h2 F t` with the details `a1 a2 e` and `b1 e`; the parent of each [Child] is its [Fork]."""
    #          0   1   2     3      4   5   6   7   8     9      10  11  12
    ids = [50, 10, FORK, CHILD, 20, 21, 9, 11, FORK, CHILD, 30, 9, 12]
    parents = [-1, 0, 1, 2, 3, 4, 5, 2, 7, 8, 9, 10, 8]
    learned = [token not in (50, CHILD) for token in ids]
    return Sample(1, np.array(ids), np.array(parents), np.array(learned))


def test_mask_groups_follow_root_and_child_threads() -> None:
    sample = forked()
    assert anchors(successors(sample)).tolist() == [0, 1, 2, 3, 4, 7, 9]
    row = pack(sample, [MaskGroup(1, 3), MaskGroup(3, 2), MaskGroup(2, 2)], (M, M, M))
    assert row.parents[13:].tolist() == [1, 13, 14, 3, 16, 2, 18]
    # behind 10: F is skipped, then the root's 11, [Fork], 12; behind [Child]: 21 and the end; behind [Fork]: the root
    assert row.targets[13:].tolist() == [11, FORK, 12, 21, 9, FORK, 12]
    assert row.ids[row.before[13:]].tolist() == [FORK, 11, FORK, 20, 21, 11, FORK]


trees = st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), min_size=2, max_size=40)


def tree_of(draws: Sequence[tuple[int, bool]]) -> Sample:
    """A random token tree in which each token has at most one trained successor."""
    parents, learned, taken = [NO_PARENT], [False], {NO_PARENT}
    for position, (draw, wants) in enumerate(draws, 1):
        parent = draw % position
        parents.append(parent)
        learned.append(wants and parent not in taken)
        if learned[-1]:
            taken.add(parent)
    ids = np.arange(100, 100 + len(parents))
    return Sample(1, ids, np.array(parents), np.array(learned))


@given(trees, st.integers(1, 6), st.integers(1, 8), st.sampled_from((0.0, 0.5, 1.0)), st.integers(0, 99))
def test_every_mask_slot_predicts_the_token_after_its_position(
    draws: list[tuple[int, bool]], mask_slots: int, count: int, drop_rate: float, seed: int
) -> None:
    sample = tree_of(draws)
    following = successors(sample)
    groups = sample_groups(following, count, mask_slots, drop_rate, np.random.default_rng(seed))
    assert len(groups) == min(count, anchors(following).size)
    assert len({group.anchor for group in groups}) == len(groups)
    assert all(1 <= group.depth <= mask_slots for group in groups)
    assert drop_rate < 1 or all(group.depth == 1 for group in groups)
    assert drop_rate > 0 or all(group.depth == mask_slots for group in groups)
    row = pack(sample, groups, (M,) * mask_slots)
    positions, visible = packing.positions_and_visibility(row.parents[None])
    own, before = sample.ids.size, [*range(sample.ids.size)]
    for position in range(own, row.ids.size):
        slot, above = int(row.mask_slots[position]), int(row.parents[position])
        before.append(int(following[before[above]]))  # the token that this one stands for
        assert row.targets[position] == sample.ids[following[before[position]]]
        assert row.before[position] == before[position]
        assert positions[0, position] == positions[0, before[position]] == positions[0, above] + 1
        anchor = position - slot + 1
        masks = visible[0, position, own:].nonzero()[0] + own
        assert masks.tolist() == list(range(anchor, position + 1))
        assert np.array_equal(visible[0, position, :own], visible[0, int(row.parents[anchor]), :own])


def test_the_drop_rate_reduces_deeper_mask_slots() -> None:
    following = successors(chain([1], list(range(10, 2010))))
    depths = np.array([group.depth for group in sample_groups(following, 2000, 4, 0.4, np.random.default_rng(0))])
    for slot, share in ((1, 1.0), (2, 0.6), (3, 0.36), (4, 0.216)):
        assert (depths >= slot).mean() == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_group_is_packed_as_a_step_of_the_runtime_feeds_it(layout: MaskLayout) -> None:
    """Ids, positions, visibility and targets of x and c1 with their mask slots, k = 2, in a step and in a packed row."""
    text, masks = [10, 11, 12, 13, 14, 15], (90, 91, 92)[: layout.rows(2)]
    row = pack(chain(text[:2], text[2:]), [MaskGroup(1, 2), MaskGroup(2, 2)], masks, layout)
    batch = collate([row, pack(chain([1], [2, 3]), (), (), layout)], group=layout.group)
    thread = root_sequence(text[:2], 32)
    draft = drafts.chain([text[2]], 2, 9, mask_layout=layout)
    part = plan_thread(thread, draft, TokenIds(mask=masks), 9)
    fed = [1, 2]  # columns of the packed row in the order of the step: x, its group, c1, its group
    fed[1:1] = range(len(text), len(text) + len(masks))
    fed += range(len(text) + len(masks), row.ids.size)
    assert row.ids[fed].tolist() == part.tokens[1:].tolist()
    assert batch.positions[0, fed].tolist() == part.positions[1:].tolist()
    visible = np.empty((part.layout.rows, part.layout.rows), np.bool_)
    mark_visible((part,), np.arange(part.layout.rows), visible)
    assert np.array_equal(batch.visible[0][fed][:, fed].numpy(), visible[1:, 1:])
    for node, group in zip((1, 2), part.layout.groups, strict=True):
        slots = [fed[index - 1] for index in group]
        # a draft behind the node's own next token: accept() takes the mask slots for these positions
        assert row.targets[slots].tolist() == text[node + 2 : node + 4]
        assert row.mask_slots[slots].tolist() == [1, 2]
        assert row.ids[row.before[slots]].tolist() == text[node + 1 : node + 3]
    leads = np.flatnonzero(row.mask_slots == packing.LEAD)
    assert leads.size == 2 * layout.lead
    assert (row.targets[leads] == packing.IGNORED).all()


def unpacked(sample: Sample) -> list[tuple[list[int], list[int]]]:
    """The N+1 unpacked texts of a packed one with their token indices: the root thread, then each child thread."""

    def path(position: int) -> list[int]:
        return [] if position == NO_PARENT else [*path(int(sample.parents[position])), position]

    leaves = sorted(set(range(sample.size)) - set(sample.parents.tolist()), reverse=True)
    return [(sample.ids[path(leaf)].tolist(), path(leaf)) for leaf in leaves]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_packed_answer_equals_its_unpacked_rows(name: str) -> None:
    sample = forked()
    row = pack(sample, (), ())
    packed_model = packed_model_of(build(FAMILY[name]), 0)
    with torch.no_grad():
        batch = collate([row])
        whole = run(packed_model, batch)[LOSS, 0]
        logits = packed_model.logits(batch.ids, batch.positions, batch.visible, batch.targets != packing.IGNORED)
        logits_at = dict(zip(np.flatnonzero(row.targets != packing.IGNORED).tolist(), logits, strict=True))
        total, learned_tokens = torch.zeros(()), 0
        for text, positions in unpacked(sample):
            single = Sample(1, np.array(text), np.arange(len(text)) - 1, np.zeros(len(text), np.bool_))
            opening = text.index(CHILD) + 1 if CHILD in text else 1  # a child learns what follows [Child]
            single.learned[opening:] = True
            alone = collate([pack(single, (), ())])
            learned = alone.targets != packing.IGNORED
            found = packed_model.logits(alone.ids, alone.positions, alone.visible, learned)
            for position, line in zip(np.array(positions)[learned[0].numpy()].tolist(), found, strict=True):
                assert (logits_at[position] - line).abs().max() < 1e-5
            total += run(packed_model, alone)[LOSS, 0]
            learned_tokens += int(learned.sum())
    assert learned_tokens == len(logits_at)
    assert whole.item() == pytest.approx(total.item(), rel=1e-6)


def test_padding_changes_nothing() -> None:
    packed_model = packed_model_of(build(FAMILY["llama"]), 3)
    table = packed_model.model.get_input_embeddings().weight  # type: ignore[operator]
    packed_model.correction = DraftCorrection(table, 2, Factors(*(torch.randn(table.shape[1], 2) for _ in range(2))))
    short = pack(chain([50], [10, 11, 12]), [MaskGroup(0, 2)], (M, M, M))
    long = pack(forked(), [MaskGroup(1, 3)], (M, M, M))
    with torch.no_grad():
        alone = run(packed_model, collate([short])) + run(packed_model, collate([long]))
        together = run(packed_model, collate([short, long]))
    assert alone[CORRECTED_LOSS].any()
    assert torch.allclose(alone, together, atol=1e-4)


FORKED, FLAT, WHOLE = 1000, 2000, 3000  # first tokens, which identify the samples' kinds and numbers


def sample(first: int, number: int) -> Sample:
    ids = np.array([first + number, *range(1, 4 + number % 5)])
    return Sample(number, ids, np.arange(ids.size) - 1, np.arange(ids.size) > 0)


def prepared(forked: int, whole: int) -> Prepared:
    could_fork = ([sample(first, number) for number in range(forked)] for first in (FORKED, FLAT))
    return Prepared(*could_fork, whole=[sample(WHOLE, number) for number in range(whole)])


def epoch(batches: TrainingBatches, number: int) -> Counter[int]:
    """First tokens of an epoch's rows."""
    steps = range(number * batches.epoch_steps, (number + 1) * batches.epoch_steps)
    return Counter(int(row.ids[0]) for step in steps for row in batches.rows(step))


def kinds(found: Counter[int]) -> list[int]:
    """Number of rows per epoch that fork, that could fork but do not, and that cannot fork."""
    return [sum(found[token] for token in found if token // 1000 * 1000 == kind) for kind in (FORKED, FLAT, WHOLE)]


def ids_of(batches: TrainingBatches) -> list[list[bytes]]:
    """The rows of each step."""
    steps = (batches.rows(step) for step in range(batches.steps))
    return [[row.ids.tobytes() + row.parents.tobytes() + row.targets.tobytes() for row in rows] for rows in steps]


def test_every_epoch_has_each_sample_once_in_other_steps() -> None:
    batches = TrainingBatches(prepared(0, 23), TrainingSettings("apar", batch_size=5, epochs=2), ())
    assert (batches.samples, batches.epoch_steps, batches.steps) == (23, 5, 10)
    assert epoch(batches, 0) == epoch(batches, 1) == Counter(range(WHOLE, WHOLE + 23))
    steps = [frozenset(rows) for rows in ids_of(batches)]
    assert {*steps[:5]} != {*steps[5:]}


def test_rows_follow_the_seed_and_anchors_are_resampled_in_each_epoch() -> None:
    settings = TrainingSettings("both", batch_size=100, epochs=4, anchors=2, mask_slots=2)
    one, again, other = (
        ids_of(TrainingBatches(prepared(9, 9), replace(settings, seed=seed), (90,))) for seed in (0, 0, 1)
    )
    assert one == again
    assert len({*map(tuple, one), *map(tuple, other)}) == 8  # each epoch is one step
    backwards = TrainingBatches(prepared(9, 9), settings, (90,))
    assert [len(backwards.rows(step)) for step in (3, 2, 1)] == [18] * 3
    assert ids_of(backwards) == one


@pytest.mark.parametrize(("rate", "least", "most"), [(0.0, 0, 0), (0.3, 40, 80), (1.0, 200, 200)])
def test_the_unforked_answers_are_resampled_every_epoch(rate: float, least: int, most: int) -> None:
    batches = TrainingBatches(prepared(200, 10), TrainingSettings("apar", batch_size=30, unfork_rate=rate), ())
    found = [epoch(batches, number) for number in range(2)]
    for one in found:
        forked, flat, whole = kinds(one)
        assert (forked + flat, whole) == (200, 10)
        assert least <= flat <= most
        assert {token % 1000 for token in one if token < WHOLE} == set(range(200))
    assert (found[0] == found[1]) == (rate in (0.0, 1.0))


def test_max_steps_limits_the_epochs() -> None:
    for epochs, most, steps in ((1.5, None, 8), (1.5, 3, 3), (0.1, None, 1), (1.0, 100, 5)):
        settings = TrainingSettings("apar", batch_size=4, epochs=epochs, max_steps=most)
        assert TrainingBatches(prepared(0, 20), settings, ()).steps == steps


def test_an_empty_training_set_and_forks_without_forking_answers_are_refused() -> None:
    with pytest.raises(InputFault, match="no training samples"):
        TrainingBatches(prepared(0, 0), TrainingSettings("apar"), ())
    for objective in ("apar", "both"):
        message = rf"no answer forks, with --objective {objective} \(2 not forked: formula\): expected answers with"
        flat = prepared(0, 1)
        flat.counts["not forked: formula"] = 2
        with pytest.raises(InputFault, match=message):
            require_forks(TrainingSettings(objective), flat)
    require_forks(TrainingSettings("sar"), prepared(0, 1))
    require_forks(TrainingSettings("both"), prepared(1, 0))


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
    model = build(FAMILY[name]).eval().requires_grad_(False)
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
    return build(replace(FAMILY[name], options={**FAMILY[name].options, **options}))


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
