"""A slice of the campaign: none of its cases crashes, hangs, raises an untyped error or changes another's output."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from random import Random

import pytest

from attack.__main__ import PARTS
from attack.mutations import mutate, repair
from attack.opener import Opener
from attack.outcome import Budget, Outcome, table
from spaceport.runtime import open_bundle
from support.paths import DOCS, ROOT
from support.small_bundle import fill

_FINDING = re.compile(r"^\| (\d+) \| .+ \| `(tests/\S+\.py)`: `(test_\w+)` \|$", re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("part", PARTS)
def test_no_case_of_a_part_fails(part: str, tmp_path: Path) -> None:
    assert PARTS[part](tmp_path, 1, Budget(20.0)).failures == []


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


def test_a_process_that_ends_and_a_failed_case_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opener, outcome = Opener(), Outcome("swaps", 7)
    assert opener.open(tmp_path) == "refused BundleError"
    opener.close()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert opener.open(tmp_path) == "signal or exit 1"
    outcome.note("0", "whole", True)
    outcome.note("1", "mixed", False)
    assert table([outcome]).splitlines()[2] == "| swaps | 2 | 1 | 0 | 7 | 1 whole, 1 mixed |"
    assert "swaps: 1: mixed" in table([outcome])


def test_each_finding_has_a_test_that_is_not_skipped() -> None:
    rows = _FINDING.findall((DOCS / "reliability.md").read_text("utf-8"))
    assert [int(number) for number, _, _ in rows] == list(range(1, 15))
    for number, file, name in rows:
        before, found, _ = (ROOT / file).read_text("utf-8").partition(f"def {name}(")
        assert found, f"finding {number}: {file} has no test {name}"
        assert "skip" not in before.rpartition("\n\n\n")[2], f"finding {number}: skipped"
