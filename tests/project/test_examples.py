"""The examples of docs/examples run as their pages say and print what stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from runpy import run_path

import pytest

from spaceport.tools.cli import run
from support.paths import DOCS, ROOT

EXAMPLES = sorted((DOCS / "examples").iterdir())
RUNS = [
    pytest.param(example, id=example.name, marks=[pytest.mark.slow] if example.name[:2] in ("01", "08") else [])
    for example in EXAMPLES
]
SHOWN = re.compile(r"^```console\n\$ ([^\n]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANYTHING = "…"  # stands for what differs from run to run: the rest of a line, or as a line for any lines


@pytest.fixture
def beside_the_bundle(demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the checkout, after the first example has made demo.bundle."""
    for folder in ("docs", "tools", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.bundle").symlink_to(demo_bundle)
    return tmp_path


def pattern(shown: str) -> str:
    """What a page shows as a regular expression."""
    lines = ["(?:.*\n)*?" if line == ANYTHING else f"{re.escape(line)}\n" for line in shown.splitlines()]
    return "".join(lines).replace(re.escape(ANYTHING), ".*").replace(ANYTHING, ".*")


def shown_by(example: Path) -> tuple[list[str], str]:
    """The command of an example's page, and what it prints."""
    command, output = SHOWN.findall((example / "README.md").read_text("utf-8"))[0]
    return shlex.split(command), output


def play(program: Path, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python program, as if it was called with these arguments."""
    monkeypatch.setattr(sys, "argv", [str(program), *arguments])
    monkeypatch.syspath_prepend(str(program.parent))
    run_path(str(program), run_name="__main__")


def commands_of(script: Path, arguments: Sequence[str]) -> list[list[str]]:
    """The `spaceport` commands that a shell script runs; the shell itself expands their arguments."""
    script_of_calls = 'spaceport() { printf "%s\\0" "$@"; printf "\\n"; }; . "$0"'
    found = subprocess.run(
        ["sh", "-c", script_of_calls, str(script), *arguments], capture_output=True, text=True, check=True
    )
    return [line.split("\0")[:-1] for line in found.stdout.splitlines()]


def test_examples_are_numbered_without_a_gap_and_listed_in_the_index() -> None:
    names = [example.name for example in EXAMPLES]
    assert [int(name[:2]) for name in names] == list(range(1, len(names) + 1))
    assert (
        re.findall(r"^\| \[(\w+)\]\(examples/\1/README\.md\) \|", (DOCS / "README.md").read_text("utf-8"), re.M)
        == names
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_a_page_has_the_number_and_the_command_of_its_example(example: Path) -> None:
    assert (example / "README.md").read_text("utf-8").startswith(f"# {example.name[:2]}: ")
    command, _ = shown_by(example)
    program = next(part for part in command if part.endswith((".py", ".sh")))
    assert (ROOT / program).parent == example
    assert program.endswith(".py") or (ROOT / program).stat().st_mode & 0o100


@pytest.mark.parametrize("example", RUNS)
def test_an_example_prints_what_its_page_shows(
    example: Path, beside_the_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, shown = shown_by(example)
    if command[0] == "python":
        play(Path(command[1]), command[2:], monkeypatch)
    else:
        if example.name.startswith("01"):
            (beside_the_bundle / "demo.bundle").unlink()  # this one makes it
        commands = commands_of(Path(command[0]), command[1:])
        assert [run(arguments) for arguments in commands] == [0] * len(commands), capsys.readouterr().err
    out = capsys.readouterr().out
    assert re.fullmatch(pattern(shown), out) is not None, out
