"""A slice of the campaign: none of its cases crashes, hangs, raises an untyped error or changes another's output."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

from attack.bundles import mutated_bundles, swapped_bundles
from attack.fork_bombs import fork_bombs
from attack.grammars import slow_grammars
from attack.injections import injected_tokens
from attack.kills import killed_commands
from attack.mutations import mutate, repair
from attack.opener import Opener
from attack.outcome import Budget, Outcome, table
from attack.requests import hostile_requests
from attack.soak import Latencies, Usage, soak
from attack.templates import hostile_templates
from spaceport.runtime import open_bundle
from support.small_bundle import fill

SLICE = Budget(20.0)  # seconds; nine parts take three minutes


@pytest.mark.nightly
def test_mutated_bundles_are_refused_or_have_the_same_output(tiny_bundle: Path, tmp_path: Path) -> None:
    assert mutated_bundles(tiny_bundle, tmp_path, 1, SLICE).failures == []


@pytest.mark.nightly
def test_swapped_bundles_are_never_mixed(tiny_bundle: Path, tmp_path: Path) -> None:
    assert swapped_bundles(tiny_bundle, tmp_path, 1, SLICE).failures == []


@pytest.mark.nightly
@pytest.mark.torch
def test_killed_commands_leave_whole_targets_and_need_no_help(tmp_path: Path) -> None:
    assert killed_commands(tmp_path, 1, SLICE).failures == []


@pytest.mark.nightly
def test_hostile_templates_have_typed_errors(tiny_bundle: Path, tmp_path: Path) -> None:
    assert hostile_templates(tiny_bundle, tmp_path, 1, SLICE).failures == []


@pytest.mark.nightly
def test_no_spelled_out_token_becomes_a_control_token(demo_bundle: Path) -> None:
    outcome = injected_tokens(demo_bundle, 1, SLICE)
    assert outcome.failures == []
    assert outcome.figures["control tokens where they are allowed"] == "in 27 of 36"  # nine roles are refused


@pytest.mark.nightly
def test_slow_grammars_end_or_are_refused(demo_bundle: Path) -> None:
    assert slow_grammars(demo_bundle, 1, SLICE).failures == []


@pytest.mark.nightly
def test_fork_bombs_change_no_other_output(demo_bundle: Path) -> None:
    assert fork_bombs(demo_bundle, 1, SLICE).failures == []


@pytest.mark.nightly
def test_hostile_requests_change_no_other_output(demo_bundle: Path) -> None:
    assert hostile_requests(demo_bundle, 1, SLICE).failures == []


@pytest.mark.nightly
def test_load_with_cancellations_leaves_nothing_behind(tiny_bundle: Path) -> None:
    assert soak(tiny_bundle, 1, SLICE).failures == []


def test_every_mutation_changes_the_bundle_and_repaired_hashes_are_right(tmp_path: Path) -> None:
    repaired = 0
    for number in range(120):
        folder = tmp_path / str(number)
        folder.mkdir()
        fill(folder)
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        mutate(folder, Random(number))
        after = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        assert before != after, number
        if set(after) == set(before) and after["manifest.json"] == before["manifest.json"] and repair(folder):
            open_bundle(folder)
            repaired += 1
    assert repaired > 20


def test_the_memory_slope_is_that_of_the_samples_after_the_warm_up() -> None:
    usage = Usage([float(second) for second in range(100)], [50.0 + max(0, 20 - second) for second in range(100)])
    assert abs(usage.slope()) < 1e-6
    usage.mebibytes = [50 + second / 3600 for second in range(100)]
    assert usage.slope() == pytest.approx(1, rel=1e-3)


def test_latencies_are_those_of_each_third_and_need_no_further_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("attack.soak.time.monotonic", lambda: now)
    latencies = Latencies(30)
    for second in range(30):
        now = float(second)
        for _ in range(99):
            latencies.note(0.1 if second < 10 else 0.2)
        latencies.note(None)
    assert latencies.percentile(0, 50) == pytest.approx(0.1, rel=0.03)
    assert latencies.percentile(2, 99) == pytest.approx(0.2, rel=0.03)
    assert latencies.requests.tolist() == [1000, 1000, 1000]
    assert set(latencies.figures()) == {"latency", "CPU time per request"}


def test_an_opener_survives_a_bundle_that_ends_its_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opener = Opener(60)
    assert opener.open(tmp_path) == "refused BundleError"
    monkeypatch.setattr(sys, "executable", "/bin/false")
    opener.close()
    assert opener.open(tmp_path).startswith("signal or exit")
    opener.close()


def test_the_table_names_seeds_counts_and_failures() -> None:
    outcome = Outcome("swaps", 7)
    outcome.note("0", "whole", True)
    outcome.note("1", "mixed", False)
    assert table([outcome]).splitlines()[2] == "| swaps | 2 | 1 | 0 | 7 | 1 whole, 1 mixed |"
    assert "swaps: 1: mixed" in table([outcome])


def test_a_budget_has_at_least_one_case_and_at_most_its_number() -> None:
    assert list(Budget(0).numbers()) == [0]
    assert list(Budget(60, 3).numbers()) == [0, 1, 2]
