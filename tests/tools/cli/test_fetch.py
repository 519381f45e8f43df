"""`spaceport fetch`: reports what was fetched, and errors with their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, OK, USAGE
from support.small_bundle import new_bundle


def test_the_command_reports_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, target = new_bundle(tmp_path / "store"), tmp_path / "copy"
    assert run(["fetch", str(bundle), str(target), "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found["fetched_bytes"] == found["total_bytes"] > 2048
    assert run(["fetch", str(bundle), str(target)]) == OK
    assert "has the bundle already" in capsys.readouterr().out
    assert run(["fetch", str(bundle / "nothing"), str(target)]) == INPUT
    assert "no manifest.json there: expected the address of a bundle's folder" in capsys.readouterr().err
    assert run(["fetch", "https://user:word@host/a", str(target)]) == USAGE
