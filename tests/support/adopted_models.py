"""Adopted models: what commands say of a bundle, and of its base model with the same adapter folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import OK

LIMITS = ("--max-tokens", "9", "--max-seq-len", "64", "--threads", "1")


def answers(folder: Path) -> Path:
    """A file with a short conversation."""
    file = folder / "data.jsonl"
    file.write_text('{"prompt": "import json", "response": "import os"}\n', "utf-8")
    return file


def checked_acceptance(
    bundle: Path, base: Path, adapter: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """The acceptance of a bundle, which passes its check, and has the same as its base model with the adapter folder."""
    with_adapter = ["--adapter", str(adapter)]
    assert run(["check", str(bundle), str(base), "--long-context", "40", "--threads", "1", *with_adapter]) == OK
    capsys.readouterr()
    found: list[dict[str, Any]] = []
    for model in ([str(bundle), str(data)], [str(base), str(data), *with_adapter]):
        assert run(["acceptance", *model, *LIMITS, "--json"]) == OK
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    return found[0]
