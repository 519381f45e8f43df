"""The README's commands and its program run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from spaceport.tools.cli import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_commands_and_the_program_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (console,) = blocks("console")
    commands = [line.removeprefix("$ ") for line in console.splitlines()]
    assert len(commands) == 6
    for line in commands:
        program, *arguments = shlex.split(line)
        assert program == "spaceport"
        assert run(arguments) == 0, capsys.readouterr().err
    (program_text,) = blocks("python")
    capsys.readouterr()
    exec(compile(program_text, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "re.MULTILINE" in out
    assert '"""JSON token scanner' in out


def test_every_link_leads_to_a_file() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_demo_checks_the_graph_and_finds_every_drafted_text_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", str(ROOT / "tests" / "data" / "tiny"), "--max-tokens", "96"]) == 0
    out = capsys.readouterr().out
    table = re.findall(r"^(.+?)  +(plain|k = \d) +(\d+) +(\d+) .* (-|the same|DIFFERENT)$", out, re.MULTILINE)
    assert len(table) == 3 * 4
    shown = re.findall(r"^(.+?)  +(plain|k = \d) +(\d+) +(\d+) .* (-|the same)$", README, re.MULTILINE)
    assert len(shown) == 6
    assert set(shown) <= set(table), "the README shows what the demo prints, times apart"
    assert {row[-1] for row in table} == {"-", "the same"}
    assert "passed" in out
