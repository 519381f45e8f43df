"""Forks: threads, complete answers and the time per answer."""

from __future__ import annotations

import pytest

from spaceport.runtime.decode.statistics import Statistics
from spaceport.tools.bench.chat.forks import fork_figures
from support.chat_subjects import chat_answer, chat_measured, chat_prompt

STEPS = Statistics(steps=5)


def test_answers_that_are_complete_in_both_have_a_speedup_of_their_own() -> None:
    one, two = chat_prompt(1, "lists"), chat_prompt(2, "lists")
    found = chat_measured(
        ("plain", 1, one, chat_answer(8.0, statistics=STEPS)),
        ("plain", 1, two, chat_answer(8.0, complete=False, statistics=STEPS)),
        ("forked", 1, one, chat_answer(4.0, tokens=10, threads=3, statistics=STEPS)),
        ("forked", 1, two, chat_answer(1.0, tokens=20, threads=5, statistics=STEPS)),
    )
    plain, forked = fork_figures(found, ["plain", "forked"], 0)
    assert (plain.answer_speedup, plain.complete_speedup) == (None, None)
    assert (forked.answers, forked.complete, plain.complete) == (2, 2, 1)
    assert (forked.threads, forked.most_threads, forked.tokens, forked.seconds) == (4.0, 5, 15.0, 2.5)
    assert forked.tokens_per_second == pytest.approx(30 / 5)
    assert forked.tokens_per_step == pytest.approx(3.0)
    assert forked.answer_speedup is not None
    assert forked.answer_speedup.mean == pytest.approx((2 * 8) ** 0.5)
    assert forked.complete_speedup is not None
    assert forked.complete_speedup.mean == pytest.approx(2.0)
    assert forked.complete_speedup.prompts == 1


def test_without_answers_there_are_no_figures() -> None:
    assert fork_figures(chat_measured(), ["plain"], 0) == ()
