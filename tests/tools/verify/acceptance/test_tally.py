"""Acceptance: what is counted in tables worked out by hand, and the passages that data are read as."""

from __future__ import annotations

import numpy as np
import pytest

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.tools.tune.conversations import Conversation, Turn
from spaceport.tools.tune.samples import Prepared, Sample
from spaceport.tools.verify.acceptance.given import Passage, given_answers, passages_of
from spaceport.tools.verify.acceptance.predictions import NOTHING
from spaceport.tools.verify.acceptance.tally import Forks, Tally, count_steps, hits

FORK, CHILD = 630, 631


def test_the_counts_of_a_table_are_those_worked_out_by_hand() -> None:
    answer = (5, 6, 7, 8, 9)
    found = np.array(
        [  # next token, mask slot 1, mask slot 2 behind the token before each place
            [5, 6, 7],  # all right: behind the prompt stand 5 6 7
            [6, 7, 0],
            [0, 8, 9],
            [8, 0, NOTHING],  # 9 is missed
            [9, NOTHING, NOTHING],
        ]
    )
    tally = Tally(2)
    tally.add(found, answer, ended=True)
    assert tally.asked == [5, 4, 3]
    assert tally.right == [4, 3, 2]
    # k = 1: 5 | 6 7 | 8 9
    # k = 2: 5 | 6 7 8 | 9
    assert tally.steps == [5, 3, 3]
    assert tally.accuracy == [4 / 5, 3 / 4, 2 / 3]
    assert tally.tokens_per_step == [4 / 5, 4 / 3, 4 / 3]


def test_a_deeper_slot_does_not_count_behind_a_wrong_one() -> None:
    answer = (5, 6, 7, 8)
    found = np.array([[5, 0, 7], [6, 0, 8], [7, 0, NOTHING], [8, NOTHING, NOTHING]])
    assert count_steps(hits(found, answer), 2) == 4


def test_an_answer_of_one_token_takes_one_step_and_asks_no_mask_slot() -> None:
    tally = Tally(3)
    tally.add(np.array([[5, NOTHING, NOTHING, NOTHING]]), (5,), ended=False)
    assert (tally.asked, tally.steps, tally.accuracy[1]) == ([1, 0, 0, 0], [1, 1, 1, 1], None)


def test_precision_and_recall_of_forks_are_those_worked_out_by_hand() -> None:
    forks = Forks()
    forks.add(np.array([FORK, 1, FORK, 2, 3]), (FORK, 1, 2, FORK, FORK), FORK)
    assert (forks.places, forks.written, forks.predicted, forks.right) == (5, 3, 2, 1)
    assert (forks.precision, forks.recall) == (1 / 2, 1 / 3)
    forks.add(np.array([FORK]), (1,), FORK)  # an answer with no tree
    assert forks.precision == 1 / 3


def test_a_sample_with_a_tree_becomes_its_spine_and_its_children() -> None:
    #                     0  1  2  3     4      5  6  7     8      9  10
    ids = np.array([1, 2, 9, FORK, CHILD, 7, 8, FORK, CHILD, 6, 5])
    parents = np.array([-1, 0, 1, 2, 3, 4, 3, 6, 7, 8, 7])
    learned = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1], np.bool_)
    sample = Sample(1, ids, parents, learned)
    assert passages_of(sample, TokenIds(mask=(4,), fork=FORK, child=CHILD)) == [
        Passage((1, 2), (9, FORK, 8, FORK, 5)),
        Passage((1, 2, 9, FORK, CHILD), (7,), child=True),
        Passage((1, 2, 9, FORK, 8, FORK, CHILD), (6,), child=True),
    ]


def test_every_answer_of_a_chat_is_read_and_the_last_is_asked_for() -> None:
    chain = np.arange(-1, 5)
    chat = Sample(1, np.arange(10, 16), chain, np.array([0, 1, 0, 0, 1, 1], np.bool_))
    (found,) = given_answers(Prepared(whole=[chat]), [Conversation(1, (Turn("user", "a"),))], TokenIds())
    assert found.passages == (Passage((10,), (11,)), Passage((10, 11, 12, 13), (14, 15)))
    assert found.prompt == (10, 11, 12, 13)


@pytest.mark.parametrize(("size", "prompt"), [(7, 3), (63, 31), (100, 32)])
def test_the_beginning_of_a_plain_text_counts_as_its_prompt(size: int, prompt: int) -> None:
    learned = np.ones(size, np.bool_)
    learned[0] = False
    text = Sample(3, np.arange(size), np.arange(-1, size - 1), learned)
    (found,) = given_answers(Prepared(whole=[text]), [Conversation(3, (Turn("text", "a"),))], TokenIds())
    assert found.prompt == tuple(range(prompt))
    assert found.passages == (Passage(tuple(range(prompt)), tuple(range(prompt, size))),)
