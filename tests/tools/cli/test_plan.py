"""`spaceport plan`: its tables and its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, OK, USAGE

Capture = pytest.CaptureFixture[str]


def test_it_shows_step_costs_and_the_drafts_that_pay_off(demo_bundle: Path, capsys: Capture) -> None:
    assert run(["plan", str(demo_bundle), "--threads", "1", "--acceptance", "0.79", "--acceptance", "0.9,0.5"]) == OK
    out = capsys.readouterr().out
    assert out.startswith("Steps of 1 request with 256 tokens of context\n")
    assert re.search(r"^ +1 +[\d.]+ +1\.00$", out, re.MULTILINE)
    assert re.search(
        r"^Acceptance rate 0.79: [\d.]+ tokens per step, [\d.]+ times as fast as plain decoding$", out, re.MULTILINE
    )
    assert "Acceptance rate 0.9, 0.5: " in out


def test_json_has_both_tables(demo_bundle: Path, capsys: Capture) -> None:
    assert run(["plan", str(demo_bundle), "--threads", "1", "--requests", "2", "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["context"]) == (2, 256)
    assert found["rows"][0]["ratio"] == 1.0
    assert [drafts["acceptance"][0] for drafts in found["drafts"]] == [0.5, 0.7, 0.9]
    assert [step["at_hand"] for step in found["drafts"][0]["steps"]] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("given", ["", "x", "1.5", "0.5,-1", "nan"])
def test_a_rate_that_is_no_probability_is_an_error(given: str, tmp_path: Path, capsys: Capture) -> None:
    assert run(["plan", str(tmp_path), "--acceptance", given]) == USAGE
    assert f"--acceptance is {given!r}: expected probabilities from 0 to 1" in capsys.readouterr().err


def test_a_folder_without_a_bundle_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    assert run(["plan", str(tmp_path)]) == INPUT
    assert run(["plan", str(tmp_path), "--requests", "0"]) == USAGE
