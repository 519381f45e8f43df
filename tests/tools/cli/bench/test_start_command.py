"""`spaceport bench start`: services start, answer and end, and their phases add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spaceport.runtime.backends.step_costs import cache_folder
from spaceport.tools.bench.serve.processes import ProcessFailed
from spaceport.tools.bench.start.service_start import measured
from spaceport.tools.cli import run
from spaceport.tools.cli.bench.start import page_caches_of
from spaceport.tools.cli.exit_codes import INPUT, OK, USAGE

Capture = pytest.CaptureFixture[str]


@pytest.mark.slow
def test_phases_of_a_start_add_up(demo_bundle: Path, capsys: Capture) -> None:
    before = set(cache_folder().glob("*"))
    options = ["--rounds", "1", "--page-cache", "warm", "--threads", "1", "--max-requests", "2", "--max-seq-len", "256"]
    assert run(["bench", "start", str(demo_bundle), *options, "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert [one["condition"] for one in found["starts"]] == [
        {"page_cache": "warm", "step_costs": True},
        {"page_cache": "warm", "step_costs": False},
    ]
    for one in found["starts"]:
        times = one["medians"]
        assert all(seconds >= 0 for seconds in times.values())
        assert times["verify"] + times["engine"] + times["step_costs"] <= times["opening"] + 0.01
        assert times["imports"] + times["opening"] <= times["ready"] + 0.01
        assert times["total"] == pytest.approx(times["ready"] + times["first_token"])
    stored, missing = (one["medians"]["step_costs"] for one in found["starts"])
    assert stored < missing
    assert found["weight_bytes"] > 8_000_000
    assert set(cache_folder().glob("*")) == before  # those of the user are not touched


@pytest.mark.slow
def test_a_service_that_does_not_start_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match=r"exit code 3: .*no such folder: expected a bundle"):
        measured([tmp_path / "nothing"], [], "a", tmp_path, tmp_path / "log")


def test_a_missing_bundle_is_refused_before_a_service_is_started(tmp_path: Path, capsys: Capture) -> None:
    assert run(["bench", "start", str(tmp_path / "nothing")]) == INPUT
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["", "hot", "warm,"])
def test_the_page_cache_is_warm_or_cold(tmp_path: Path, given: str, capsys: Capture) -> None:
    assert run(["bench", "start", str(tmp_path), "--page-cache", given]) == USAGE
    assert "expected warm, cold or warm,cold" in capsys.readouterr().err
    assert page_caches_of("cold,warm,cold") == ["cold", "warm"]
