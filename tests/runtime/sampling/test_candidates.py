"""Candidates of mask slots: the most probable tokens, and those that a draft correction makes of them."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.graphs.contract.draft_methods import CorrectionTables, read_tables, write_tables
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.costs import Curve, StepCosts
from spaceport.runtime.decode.draft import Candidates, Draft, DraftConfig, Outlook, Shape, tree
from spaceport.runtime.decode.plan import Verdict, plan_thread
from spaceport.runtime.decode.planner import DraftPlanner, Sharing, TreeDrafter, drafter_for
from spaceport.runtime.decode.sequence import root_sequence
from spaceport.runtime.decode.sources import Predictions
from spaceport.runtime.sampling.choice import Bans, Corrected, CorrectedCandidates, Greedy, top_candidates
from spaceport.runtime.sampling.sampler import Sampling, chooser

VOCAB = 8
# Token 6 makes 2 more probable and token 7 makes 3 more probable, by a factor of e to the 2.
BEFORE = np.zeros((VOCAB, 2), np.float16)
BEFORE[6, 0] = BEFORE[7, 1] = 2
AFTER = np.zeros((VOCAB, 2), np.float16)
AFTER[2, 0] = AFTER[3, 1] = 1
TABLES = CorrectionTables(BEFORE, AFTER)
NO_BANS = Bans(frozenset())


def corrected(most: int = 3) -> CorrectedCandidates:
    return CorrectedCandidates((1, 2, 3), (0.5, 0.3, 0.1), TABLES, most)


@pytest.mark.parametrize(("before", "order"), [(0, (1, 2, 3)), (6, (2, 1, 3)), (7, (3, 1, 2))])
def test_the_token_before_changes_the_order(before: int, order: tuple[int, ...]) -> None:
    found = corrected().behind(before)
    assert found.tokens == order
    assert sum(found.probabilities) == pytest.approx(0.9)  # the sum is that of the mask slot
    assert sorted(found.probabilities, reverse=True) == list(found.probabilities)
    if before == 6:
        weights = [0.3 * math.e**2, 0.5, 0.1]
        assert found.probabilities == pytest.approx([0.9 * each / sum(weights) for each in weights], rel=1e-3)
    assert corrected(2).behind(before).tokens == order[:2]
    assert CorrectedCandidates((), (), TABLES, 2).behind(before).tokens == ()
    assert CorrectedCandidates((4,), (0.0,), TABLES, 2).behind(before) == Candidates((4,), (0.0,))


def test_a_chain_follows_its_own_tokens() -> None:
    """The first mask slot proposes 6 behind 0; 6 changes the order of the second one."""
    first = CorrectedCandidates((6, 7), (0.6, 0.3), TABLES, 3)
    assert Predictions("mask", (first, corrected()), 0).best() == [6, 2]
    assert Predictions("mask", (corrected(), Candidates((), ()), corrected()), 7).best() == [3]


def test_each_branch_of_a_tree_has_its_own_candidates() -> None:
    first = CorrectedCandidates((6, 7), (0.5, 0.4), TABLES, 2)
    curve = Curve([1 + 0.01 * more for more in range(9)])

    def grown(*candidates: Candidates, last: int) -> Draft:
        proposals = (Predictions("mask", candidates, last),)
        return tree(proposals, DraftConfig(siblings=2), 9, 9, Outlook(curve, 1.0, (0.0,) * 9, last))

    draft = grown(first, corrected(2), last=0)
    ways = [
        (draft.tokens[parent - 1], token) for parent, token in zip(draft.parents, draft.tokens, strict=True) if parent
    ]
    assert sorted(ways) == [(6, 1), (6, 2), (7, 1), (7, 3)]
    assert grown(corrected(1), last=6).tokens == (2,)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_drafts_start_behind_the_last_token_and_their_chain_is_learned(shape: Shape) -> None:
    """The last token is 6, which makes 2 the best candidate; 2 was accepted each time."""
    curve = StepCosts(64, ((1, 1.0), (36, 1.05), (64, 1.1)), relative=True)
    drafter = drafter_for(DraftConfig(1, shape, siblings=1), DraftPlanner(curve))
    thread = root_sequence([0, 1, 6], 64)
    for _ in range(20):
        thread.candidates = (corrected(1),)
        draft = drafter.draft(thread, 20, 9, Sharing(1, 64))
        assert draft.tokens[:1] == (2,)
        thread.fed = len(thread.tokens) - 1
        drafter.learn(plan_thread(thread, draft, TokenIds(mask=(5,)), 512), Verdict((0,), (2, 6), ()))
        thread.tokens += (2, 6)
    if isinstance(drafter, TreeDrafter):
        assert drafter._acceptance.masks[0] > 0.9


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=3), Sampling(repetition_penalty=1.3)])
def test_tokens_are_those_of_the_inner_selector(sampling: Sampling) -> None:
    inner = chooser(sampling, NO_BANS, 1)
    outer = Corrected(inner, TABLES)
    assert outer.selects == isinstance(inner, Greedy)
    rng = np.random.default_rng(0)
    for _ in range(20):
        logits = rng.normal(size=VOCAB).astype(np.float32)
        assert outer.token(logits, root_sequence([1, 6], 1), (7,)) == inner.token(
            logits, root_sequence([1, 6], 1), (7,)
        )


def test_greedy_candidates_are_those_of_the_corrected_logits() -> None:
    logits = np.random.default_rng(1).normal(size=(5, VOCAB)).astype(np.float32)
    found = Corrected(Greedy(NO_BANS), TABLES).candidates(logits, root_sequence([1, 6], 1), 2, 1)
    for before in range(VOCAB):
        expected = (logits + AFTER.astype(np.float32) @ BEFORE[before].astype(np.float32)).argmax(axis=-1)
        assert [each.behind(before).tokens for each in found] == [(int(token),) for token in expected]
    banned = Corrected(Greedy(replace(NO_BANS, never=frozenset({2}))), TABLES)
    (one,) = banned.candidates(np.eye(VOCAB, dtype=np.float32)[1:2], root_sequence([1], 1), 1, 8)
    assert 2 not in one.behind(6).tokens


def stored(array: np.ndarray) -> io.BytesIO:
    file = io.BytesIO()
    np.save(file, array)
    file.seek(0)
    return file


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (stored(np.zeros((2, 9, 4), np.float16)), r"holds float16 \(2, 9, 4\): expected float16 \(2, 8, rank\)"),
        (stored(np.zeros((2, VOCAB, 4), np.float32)), "holds float32"),
        (stored(np.full((2, VOCAB, 1), np.nan, np.float16)), "numbers that are not finite"),
        (io.BytesIO(b"nothing"), "is not an array"),
        (stored(np.array({}, dtype=object)), "is not an array"),
    ],
)
def test_tables_are_read_as_they_were_written_and_other_files_are_refused(file: io.BytesIO, message: str) -> None:
    written = io.BytesIO()
    write_tables(written, TABLES)
    written.seek(0)
    assert all(np.array_equal(*both) for both in zip(read_tables(written, VOCAB), TABLES, strict=True))
    with pytest.raises(InputFault, match=message):
        read_tables(file, VOCAB)


@given(
    seed=st.integers(0, 10**6),
    size=st.integers(8, 3000),
    peaks=st.integers(1, 6),
    most=st.integers(1, 4),
    banned=st.frozensets(st.integers(0, 7), max_size=3),
)
def test_the_top_candidates_are_those_of_a_softmax(
    seed: int, size: int, peaks: int, most: int, banned: frozenset[int]
) -> None:
    random = np.random.default_rng(seed)
    lines = random.normal(size=(3, size)).astype(np.float32)
    for line in lines:
        line[random.choice(size, peaks, replace=False)] += random.uniform(8, 12, peaks).astype(np.float32)
    weights = np.exp(lines.astype(np.float64))
    weights[:, list(banned)] = 0  # the probabilities are those of the other tokens
    probabilities = weights / weights.sum(axis=-1, keepdims=True)
    for candidate, line in zip(top_candidates(lines, most, banned), probabilities, strict=True):
        ranked = [token for token in np.argsort(-line, kind="stable").tolist() if token not in banned]
        likely = [token for token in ranked[:most] if line[token] > 0.01]
        assert list(candidate.tokens[: len(likely)]) == likely
        assert len(candidate.tokens) <= most
        for token, reported in zip(likely, candidate.probabilities, strict=False):
            assert reported == pytest.approx(line[token], rel=0.3)


def test_a_line_without_a_probable_token_gives_no_candidates() -> None:
    flat = np.stack([np.zeros(40_000), np.full(40_000, np.nan), np.random.default_rng(0).normal(size=40_000)])
    assert [candidate.tokens for candidate in top_candidates(flat.astype(np.float32), 3)] == [(), (), ()]


def test_a_banned_token_is_no_candidate_and_takes_no_probability_from_others() -> None:
    many = np.zeros(40_000, np.float32)
    many[[5, 7]] = (9.0, 8.9)
    many[20_000:] = 2.5  # within the limit, and too many to be candidates
    few = np.zeros(512, np.float32)
    few[[3, 5, 7]] = (30.0, 9.0, 8.0)
    for line, banned, most, tokens in ((many, 7, 3, (5,)), (few, 3, 2, (5, 7))):
        (found,) = top_candidates(line[None], most, frozenset({banned}))
        without = np.where(np.arange(line.size) == banned, -np.inf, line).astype(np.float32)
        assert [found] == list(top_candidates(without[None], most))
        assert found.tokens == tokens
        (one,) = Greedy(Bans(frozenset({banned}))).candidates(line[None], root_sequence([0], 8), 1, 1)
        assert one.tokens == (5,)
    (unbanned,) = top_candidates(few[None], 4)
    assert unbanned.tokens == (3,)
