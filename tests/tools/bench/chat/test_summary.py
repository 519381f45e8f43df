"""Summary: speeds, speedups and acceptance rates from given measurements."""

from __future__ import annotations

import pytest

from spaceport.runtime.decode.statistics import Statistics
from spaceport.tools.bench.chat.forks import fork_figures
from spaceport.tools.bench.chat.summary import ALL, drafts_of, figures_of, peer_ratios, prompt_figures, rounds_of
from spaceport.tools.bench.decode.summary import Rate
from support.chat_subjects import chat_answer, chat_measured, chat_prompt

CODE, OTHER, LIST = chat_prompt(3), chat_prompt(4), chat_prompt(9, "lists")
MODE = Statistics()  # marks an answer as that of a mode


def test_a_speedup_is_the_geometric_mean_over_prompts_by_kind() -> None:
    found = chat_measured(
        *(("plain", 1, prompt, chat_answer(6.0, statistics=MODE)) for prompt in (CODE, OTHER, LIST)),
        ("default", 1, CODE, chat_answer(3.0, statistics=MODE)),
        ("default", 1, OTHER, chat_answer(12.0, statistics=MODE)),
        ("default", 1, LIST, chat_answer(1.5, statistics=MODE)),
    )
    by_kind = {one.kind: one for one in figures_of(found, ["default"], ["code", "lists"], 0)}
    expected = {"code": (2 * 0.5) ** 0.5, "lists": 4.0, ALL: (2 * 0.5 * 4) ** (1 / 3)}
    means = {kind: one.speedup.mean for kind, one in by_kind.items() if one.speedup}
    assert means == pytest.approx(expected)
    overall = by_kind[ALL]
    assert overall.speedup is not None
    assert (overall.speedup.worst, overall.speedup.worst_line) == (pytest.approx(0.5), 4)
    assert overall.speedup.low < overall.speedup.mean < overall.speedup.high
    assert (overall.losses, by_kind["lists"].losses) == (1, 0)
    assert overall.tokens_per_second == pytest.approx(33 / 16.5)


def test_decoding_of_a_mode_begins_at_the_first_token_of_plain_decoding() -> None:
    found = chat_measured(
        ("plain", 1, CODE, chat_answer(6.0, first=1.0, statistics=MODE)),
        # Its first step takes longer and may generate several tokens: both count as decoding.
        ("lookup", 1, CODE, chat_answer(3.0, first=2.0, statistics=MODE)),
        ("peer", 1, CODE, chat_answer(4.0, first=2.0, first_tokens=3)),
    )
    plain, lookup, peer = figures_of(found, ["plain", "lookup", "peer"], [], 0)
    assert [one.decode_tokens_per_second for one in (plain, lookup, peer)] == pytest.approx([10 / 5, 10 / 2, 8 / 2])
    assert lookup.decode_speedup is not None
    assert lookup.decode_speedup.mean == pytest.approx(2.5)
    assert lookup.cpu_speedup == lookup.speedup
    assert plain.speedup is plain.cpu_speedup is None


def test_the_answers_of_a_conversation_count_as_one_prompt_and_one_token_has_no_decode_speed() -> None:
    chat = chat_prompt(5, "chat", turns=2)
    found = chat_measured(
        ("plain", 1, chat, chat_answer(2.0, tokens=5, complete=False, statistics=MODE)),
        ("plain", 1, chat, chat_answer(4.0, tokens=7, statistics=MODE)),
    )
    (times,) = rounds_of(found, "plain")[chat]
    assert (times.tokens, times.seconds, times.decode_tokens, times.decode_seconds) == (12, 6.0, 10, 4.0)
    assert (times.complete, times.answers) == (1, 2)
    (figures,) = figures_of(found, ["plain"], [], 0)
    assert (figures.prompts, figures.answers, figures.complete) == (1, 2, 1)
    found = chat_measured(("plain", 1, CODE, chat_answer(1.0, tokens=1, statistics=MODE)))
    (figures,) = figures_of(found, ["plain"], [], 0)
    assert (figures.decode_tokens_per_second, figures.tokens_per_second) == (None, 1.0)
    assert [prompt.decode_tokens_per_second for prompt in prompt_figures(found, ["plain"])] == [None]


def test_medians_over_rounds_decide_and_incomplete_rounds_are_left_out() -> None:
    found = chat_measured(
        *(("plain", n, prompt, chat_answer(6.0, statistics=MODE)) for n in (1, 2, 3) for prompt in (CODE, LIST)),
        *(("peer", number, CODE, chat_answer(seconds)) for number, seconds in ((1, 3.0), (2, 2.0), (3, 60.0))),
        ("peer", 1, LIST, chat_answer(0.1)),  # failed in the second round
    )
    (peer,) = figures_of(found, ["peer"], [], 0)
    assert peer.speedup is not None
    assert peer.speedup.mean == pytest.approx(2.0)
    assert peer.prompts == 1
    ratios = {ratio.kind: ratio for ratio in peer_ratios(found, ["plain"], ["peer", "none"], ["code", "lists"], 0)}
    assert ratios[ALL].speedup == ratios["code"].speedup
    assert ratios["lists"].speedup is None
    overall = ratios[ALL].speedup
    assert overall is not None
    assert overall.mean == pytest.approx(0.5)


def test_acceptance_rates_by_depth_are_those_of_the_trace() -> None:
    by_depth = {"drafted_by_depth": [9, 9, 9], "accepted_by_depth": [6, 3, 2]}
    by_source = {"drafted_by_source": {"mask": 27}, "accepted_by_source": {"mask": 11}}
    trace = Statistics(steps=10, tokens=21, **by_depth, **by_source)  # type: ignore[arg-type]
    drafts = drafts_of([trace, Statistics(steps=10, tokens=12, drafted_by_depth=[3], accepted_by_depth=[1])])
    assert drafts is not None
    assert drafts.by_depth == (Rate(12, 7), Rate(9, 3), Rate(9, 2))
    assert drafts.mean_acceptance_length == pytest.approx(1 + 12 / 20)
    assert drafts.tokens_per_step == pytest.approx(33 / 20)
    assert drafts.given_previous == pytest.approx((7 / 12, 3 / 7, 2 / 3))
    assert drafts.by_source == {"mask": Rate(27, 11)}
    assert drafts_of([Statistics(steps=4, tokens=4)]) is None
    assert drafts_of([]) is None


def test_answers_that_are_complete_with_and_without_forks_have_a_speedup_of_their_own() -> None:
    one, two, steps = chat_prompt(1, "lists"), chat_prompt(2, "lists"), Statistics(steps=5)
    found = chat_measured(
        ("plain", 1, one, chat_answer(8.0, statistics=steps)),
        ("plain", 1, two, chat_answer(8.0, complete=False, statistics=steps)),
        ("forked", 1, one, chat_answer(4.0, tokens=10, threads=3, statistics=steps)),
        ("forked", 1, two, chat_answer(1.0, tokens=20, threads=5, statistics=steps)),
    )
    plain, forked = fork_figures(found, ["plain", "forked"], 0)
    assert (plain.answer_speedup, plain.complete_speedup) == (None, None)
    assert (forked.answers, forked.complete, plain.complete) == (2, 2, 1)
    assert (forked.threads, forked.most_threads, forked.tokens, forked.seconds) == (4.0, 5, 15.0, 2.5)
    assert (forked.tokens_per_second, forked.tokens_per_step) == (pytest.approx(6), pytest.approx(3))
    assert forked.answer_speedup is not None
    assert forked.answer_speedup.mean == pytest.approx((2 * 8) ** 0.5)
    assert forked.complete_speedup is not None
    assert (forked.complete_speedup.mean, forked.complete_speedup.prompts) == (pytest.approx(2.0), 1)
    assert fork_figures(chat_measured(), ["plain"], 0) == ()
