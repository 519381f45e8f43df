"""Figures: throughput, latency and right answers of known exchanges."""

from __future__ import annotations

from typing import Any

import pytest

from spaceport.tools.bench.compare.machine import this_machine
from spaceport.tools.bench.serve.exchange import Exchange
from spaceport.tools.bench.serve.figures import drafts_of, figures_of, medians, quantiles, statuses
from spaceport.tools.bench.serve.load_run import LoadRun
from spaceport.tools.bench.serve.options import ServeOptions
from spaceport.tools.bench.serve.processes import Resources
from spaceport.tools.bench.serve.report import LoadFigures, ServeReport
from spaceport.tools.bench.serve.workload import Workload

EXPECTED = [([1, 2, 3], "abc"), ([4], "d")]


def exchange(**fields: Any) -> Exchange:
    answered = {"status": 200, "text": "abc", "tokens": 3, "ending": "stop", "text_times": [1.1, 1.4, 1.5]}
    given: dict[str, Any] = {"behaviour": "read", "streamed": True, "started": 1.0, "ended": 2.0, **answered}
    return Exchange(0, **{"prompt": 0, **given, **fields})


def test_the_outcome_of_a_request_follows_from_its_answer() -> None:
    for fields, outcome in (
        ({}, "answered"),
        ({"ending": None, "behaviour": "cancel"}, "left"),
        ({"ending": None, "behaviour": "drop"}, "left"),
        ({"ending": None}, "failed"),  # the stream ended without its last event
        ({"status": 503}, "refused"),
        ({"status": 429}, "refused"),
        ({"status": 500}, "failed"),
        ({"error": "the engine failed"}, "failed"),
    ):
        assert exchange(**fields).outcome == outcome


def test_wrong_and_late_answers_are_no_goodput() -> None:
    run = LoadRun(
        [
            exchange(),
            exchange(text="abx"),
            exchange(token_ids=[1, 2, 9]),
            exchange(token_ids=[1, 2, 3], text_times=[1.9, 2.0]),
            exchange(ending=None, behaviour="cancel", tokens=None, text_times=[1.1, 1.2]),
            exchange(status=503, ending=None, tokens=0, text="", text_times=[], ended=1.25),
        ],
        2.0,
    )
    found = figures_of(run, EXPECTED, None, first_token_limit=0.5)
    assert (found.answered, found.left, found.refused, found.failed) == (4, 1, 1, 0)
    assert (found.compared, found.different) == (4, 2)
    assert found.tokens_per_second == (4 * 3 + 2) / 2
    assert found.goodput == 3 / 2
    assert found.requests_per_second == 2
    assert found.refusal is not None
    assert found.refusal.highest == pytest.approx(250)
    assert statuses(run.exchanges) == {"200": 5, "503": 1}
    assert figures_of(run, None, None, None).compared == 0


def test_latency_counts_tokens_and_events_apart() -> None:
    one, whole = exchange(tokens=5), exchange(streamed=False, text_times=[])
    assert one.first_token_seconds == pytest.approx(0.1)
    assert one.seconds_per_token == pytest.approx(0.4 / 4)
    assert one.gaps == pytest.approx([0.3, 0.1])
    assert (whole.first_token_seconds, whole.seconds_per_token, whole.gaps) == (None, None, [])
    assert exchange(ending=None, behaviour="cancel").seconds_per_token is None
    assert quantiles([None]) is None
    found = quantiles([0.1, None, 0.3])
    assert found is not None
    assert (found.p50, found.highest) == (pytest.approx(200), pytest.approx(300))


def test_acceptance_and_cpu_time_are_those_of_all_answers() -> None:
    drafts = [{"num_spec_steps": steps, "num_draft_tokens": 8, "num_accepted_draft_tokens": 4} for steps in (2, 6)]
    found = drafts_of([exchange(drafts=one) for one in drafts] + [exchange()])
    assert found is not None
    assert (found.mean_acceptance_length, found.acceptance_rate) == (2.0, 0.5)
    assert drafts_of([exchange()]) is None
    used = Resources(0, 0, 0, 1.0, 0.5), Resources(0, 0, 0, 1.3, 0.53)
    figures = figures_of(LoadRun([exchange()], 1.0), EXPECTED, used, None)
    assert figures.cpu_per_token == pytest.approx(100)
    assert figures.main_thread_per_token == pytest.approx(10)


def test_ratios_compare_runs_of_the_same_round() -> None:
    """The median of ratios is not the ratio of medians."""
    runs = [LoadRun([exchange(text_times=[1.0 + first, 2.0])], 1.0) for first in (0.1, 0.2, 0.9)]
    found = medians([figures_of(run, None, None, None) for run in runs])  # field by field
    assert (found.first_token.p50, found.answered, found.drafts) == (pytest.approx(200), 1, None)

    def load(name: str, *seconds: float) -> LoadFigures:
        rounds = tuple(figures_of(LoadRun([exchange()], each), None, None, None) for each in seconds)
        return LoadFigures(name, 2, medians(rounds), rounds, {})

    options = ServeOptions(Workload(requests=1), (2,), urls=(("other", "http://localhost:1"),))
    loads = (load("spaceport", 1.0, 2.0, 9.0), load("other", 3.0, 1.0, 3.0))
    report = ServeReport("", this_machine(), options, 1, loads, (), (), {})
    (ratio,) = report.ratios
    assert (ratio.reference, ratio.tokens_per_second, ratio.first_token) == ("other", 0.5, 0.0)
