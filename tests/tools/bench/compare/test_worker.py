"""Worker protocol: it needs no installed packages, and adapters of other runtimes do not import this project."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from spaceport.tools.bench.compare.subjects import ADAPTERS
from support.fake_subjects import FAKE

SCRIPTS = sorted(path for path in ADAPTERS.glob("*.py") if path.stem != "__init__")
OPEN = {"call": "open", "step": 0.5, "model": "m"}


def answers(*requests: dict[str, object]) -> tuple[list[dict[str, object]], subprocess.CompletedProcess[str]]:
    """The answers of a worker in an isolated Python interpreter without installed packages."""
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    command = [sys.executable, "-I", "-S", str(ADAPTERS / "worker.py"), str(FAKE)]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    return [json.loads(line) for line in done.stdout.splitlines()], done


def test_an_isolated_interpreter_serves_an_adapter_until_its_input_ends() -> None:
    found, done = answers(
        OPEN, {"call": "prefill", "prompt": [3, 4]}, {"call": "rows", "prompt": [3], "rows": [4], "repeats": 1}
    )
    assert done.returncode == 0
    opened, prefill, rows = found
    assert set(opened["result"]) == {"import_seconds", "open_seconds", "versions"}  # type: ignore[call-overload]
    assert prefill["result"]["value"] == 1.0  # type: ignore[index]
    assert rows == {"unsupported": "it cannot"}
    assert "noise on stdout" in done.stderr


@pytest.mark.parametrize(
    ("request_", "message"),
    [({"call": "decode", "prompt": [3], "tokens": 2}, "before open"), ({**OPEN, "fails": "open"}, "no model today")],
)
def test_an_error_ends_the_process_and_is_on_stderr(request_: dict[str, object], message: str) -> None:
    found, done = answers(request_)
    assert found == []
    assert done.returncode != 0
    assert message in done.stderr


def test_an_unknown_call_is_refused_with_the_known_ones() -> None:
    _, done = answers(OPEN, {"call": "sing"})
    assert "expected open or one of decode, rows, prefill, requests" in done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_adapters_import_only_the_standard_library_at_module_level(script: Path) -> None:
    tree = ast.parse(script.read_text("utf-8"))
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {(node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top}
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)
    if script.stem != "on_spaceport":
        assert "spaceport." not in script.read_text("utf-8").split('"""', 2)[2]
