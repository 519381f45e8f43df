"""Draft correction: its scores, its losses, its factors."""

from __future__ import annotations

import torch

from spaceport.graphs.correction import DraftCorrection, Factors

VOCAB, HIDDEN, RANK = 50, 12, 5
TABLE = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.2


def factors() -> Factors:
    rng = torch.Generator().manual_seed(2)
    return Factors(*(torch.randn(HIDDEN, RANK, generator=rng) for _ in range(2)))


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
    for given, kept in zip(factors(), found.factors(), strict=True):
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
