"""Tally: counts of tables worked out by hand, and the segments of training samples."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.draft_methods import LOOKUP_KINDS
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.sources import Acceptance, Continuation, Lookup
from spaceport.tools.tune.conversations import Conversation, Turn
from spaceport.tools.tune.samples import Prepared, Sample
from spaceport.tools.verify.acceptance import ForkTally, LookupTally, Tally, correct_predictions, count_steps
from spaceport.tools.verify.answers import NO_PREDICTION, AnswerSegment, reference_answers, segments_of

FORK, CHILD = 630, 631


def test_the_counts_of_a_table_are_those_worked_out_by_hand() -> None:
    answer = (5, 6, 7, 8, 9)
    found = np.array(
        [  # predictions before each token: next token, mask slot 1, mask slot 2
            [5, 6, 7],  # all correct: the answer begins with 5 6 7
            [6, 7, 0],
            [0, 8, 9],
            [8, 0, NO_PREDICTION],  # 9 is missed
            [9, NO_PREDICTION, NO_PREDICTION],
        ]
    )
    tally = Tally(2)
    tally.add(found, answer, ended=True)
    assert tally.predictions == [5, 4, 3]
    assert tally.correct == [4, 3, 2]
    # k = 1: 5 | 6 7 | 8 9
    # k = 2: 5 | 6 7 8 | 9
    assert tally.steps == [5, 3, 3]
    assert tally.accuracy == [4 / 5, 3 / 4, 2 / 3]
    assert tally.tokens_per_step == [4 / 5, 4 / 3, 4 / 3]
    # k = 2: 6 7 are drafted and accepted, then one draft token for 9, which is wrong
    assert (tally.drafted, tally.accepted, tally.acceptance) == ([2, 1], [1, 1], [1 / 2, 1.0])


def test_a_mask_slot_after_a_wrong_one_saves_no_step_and_acceptance_is_counted_by_depth() -> None:
    answer = (5, 6, 7, 8)
    found = np.array([[5, 0, 7], [6, 0, 8], [7, 0, NO_PREDICTION], [8, NO_PREDICTION, NO_PREDICTION]])
    assert count_steps(correct_predictions(found, answer), 2) == 4
    tally = Tally(2)
    found = np.array([[5, 6, 0], [6, 7, 8], [7, 8, NO_PREDICTION], [8, NO_PREDICTION, NO_PREDICTION]])
    tally.add(found, answer, ended=False)  # 5 | 6 7 | 8: the second draft token of the second step is wrong
    assert (tally.drafted, tally.accepted, tally.acceptance) == ([2, 1], [2, 0], [1.0, 0.0])
    single = Tally(3)  # one token takes one step, and no mask slot predicts
    single.add(np.array([[5, NO_PREDICTION, NO_PREDICTION, NO_PREDICTION]]), (5,), ended=False)
    assert (single.predictions, single.steps, single.accuracy[1]) == ([1, 0, 0, 0], [1, 1, 1, 1], None)


def test_precision_and_recall_of_forks_are_those_worked_out_by_hand() -> None:
    forks = ForkTally()
    forks.add(np.array([FORK, 1, FORK, 2, 3]), (FORK, 1, 2, FORK, FORK), FORK)
    assert (forks.positions, forks.expected, forks.predicted, forks.correct) == (5, 3, 2, 1)
    assert (forks.precision, forks.recall) == (1 / 2, 1 / 3)
    forks.add(np.array([FORK]), (1,), FORK)  # an answer without forks
    assert forks.precision == 1 / 3


def test_a_sample_with_forks_becomes_its_root_and_its_children() -> None:
    #                     0  1  2  3     4      5  6  7     8      9  10
    ids = np.array([1, 2, 9, FORK, CHILD, 7, 8, FORK, CHILD, 6, 5])
    parents = np.array([-1, 0, 1, 2, 3, 4, 3, 6, 7, 8, 7])
    learned = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1], np.bool_)
    sample = Sample(1, ids, parents, learned)
    assert segments_of(sample, TokenIds(mask=(4,), fork=FORK, child=CHILD)) == [
        AnswerSegment((1, 2), (9, FORK, 8, FORK, 5)),
        AnswerSegment((1, 2, 9, FORK, CHILD), (7,), child=True),
        AnswerSegment((1, 2, 9, FORK, 8, FORK, CHILD), (6,), child=True),
    ]


def test_every_answer_of_a_chat_is_measured_and_the_last_one_is_generated_again() -> None:
    chat = Sample(1, np.arange(10, 16), np.arange(-1, 5), np.array([0, 1, 0, 0, 1, 1], np.bool_))
    (found,) = reference_answers(Prepared(whole=[chat]), [Conversation(1, (Turn("user", "a"),))], TokenIds())
    assert found.segments == (AnswerSegment((10,), (11,)), AnswerSegment((10, 11, 12, 13), (14, 15)))
    assert found.prompt == (10, 11, 12, 13)
    for size, prompt in ((7, 3), (63, 31), (100, 32)):  # the first tokens of a plain text count as its prompt
        text = Sample(3, np.arange(size), np.arange(-1, size - 1), np.arange(size) > 0)
        (found,) = reference_answers(Prepared(whole=[text]), [Conversation(3, (Turn("text", "a"),))], TokenIds())
        assert found.prompt == tuple(range(prompt))
        assert found.segments == (AnswerSegment(tuple(range(prompt)), tuple(range(prompt, size))),)


@settings(max_examples=200)
@given(
    prefix=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    answer=st.lists(st.integers(0, 3), max_size=60),
    most=st.integers(1, 8),
)
def test_lookup_tokens_are_counted_in_the_kinds_from_which_the_runtime_learns(
    prefix: list[int], answer: list[int], most: int
) -> None:
    tally = LookupTally()
    tally.add(prefix, answer, most)
    learned = Acceptance(0)
    lookup, text, copied = Lookup(), list(prefix), 0
    expected, correct = [0] * LOOKUP_KINDS, 0
    while len(text) < len(prefix) + len(answer):
        found, equal = lookup.following(text, most)
        written = answer[len(text) - len(prefix) :][: len(found) + 1]
        learned.lookup[:] = [kind / 10 for kind in range(LOOKUP_KINDS)]
        lookup.copied, lookup.copied_until = copied, len(text)
        proposal = Continuation(found, equal, lookup, len(text), learned)
        kinds = [round(10 * proposal.behind(depth, 0)[0][0]) for depth in range(len(found))]
        right = proposal.learn(written, 0.0)
        for kind in kinds[: min(right + 1, len(written))]:
            expected[kind] += 1
        correct += right
        copied = copied + right if right and right == min(len(found), len(written)) else 0
        text += written[: right + 1]
    assert tally.tokens == expected
    assert sum(tally.accepted) == correct
    assert all(good <= count for good, count in zip(tally.accepted, tally.tokens, strict=True))
