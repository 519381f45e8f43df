"""The README's commands and its program run as they stand there."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from spaceport.tools.cli import run
from support.paths import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.slow]

README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands_of(block: str) -> list[list[str]]:
    """The arguments of the commands in a block of the README."""
    lines = [shlex.split(line.removeprefix("$ ")) for line in block.splitlines()]
    assert all(line[0] == "spaceport" for line in lines)
    return [line[1:] for line in lines]


def test_the_commands_and_the_program_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    commands = commands_of(blocks("console")[0])
    assert len(commands) == 6
    for arguments in commands:
        assert run(arguments) == 0, capsys.readouterr().err
    (program_text,) = blocks("python")
    capsys.readouterr()
    exec(compile(program_text, "README.md", "exec"), {})
    assert "move has two parameters, src, which is required, and dst" in capsys.readouterr().out


@pytest.mark.nightly  # docs/examples/07_tuning does most of it in each run
def test_a_model_learns_as_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").symlink_to(ROOT / "tests" / "data" / "tiny")
    items = "\n".join(f"{number}. part {number}: as it was found there" for number in (1, 2, 3))
    chats = [{"prompt": f"What is in box {box}?", "response": f"These:\n{items}"} for box in range(4)]
    for name in ("train.jsonl", "heldout.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(chat) + "\n" for chat in chats), "utf-8")
    for arguments in commands_of(blocks("console")[1]):
        assert run(arguments) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "tuned.bundle: llama" in out
    assert "mask slot" in out


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="TensorRT-RTX is there for Linux only")
def test_engines_are_built_checked_and_audited_as_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "prompts.jsonl").write_text('{"text": "import json"}\n', "utf-8")
    for arguments in commands_of(blocks("console")[2]):
        assert run(arguments) == 0, capsys.readouterr().err
    assert sorted(file.name[:4] for file in (tmp_path / "demo-gpu.bundle" / "engines").iterdir()) == ["sm80", "sm89"]
    assert "lossless: " in capsys.readouterr().out


ROW = re.compile(
    r"^(plain|speculative|parallel threads|both) +(\d.*\d) +[\d.]+ +[\d.]+  (-|identical|DIFFERENT)$", re.MULTILINE
)
THREAD = re.compile(r"^(?:root|thread \d)  .*(?:\n {10}.*)*", re.MULTILINE)


SPECULATIVE = ("speculative", "both")


def repeatable(row: tuple[str, str, str]) -> tuple[str, str, str]:
    """The part of a demo row that is the same on every machine: draft sizes, and so steps, depend on step costs."""
    name, counts, verdict = row
    return name, counts.split()[0] if name in SPECULATIVE else counts, verdict


def unmarked(thread: str) -> str:
    """A thread without the marks of its accepted drafts, which depend on the machine as well."""
    return re.sub(r"[\[\]\s]+", "", thread)


def test_the_demo_checks_the_graph_and_finds_every_speculative_output_identical(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["demo"]) == 0
    out = capsys.readouterr().out
    table = ROW.findall(out)
    assert len(table) == 4 + 4 + 2
    assert [row[2] for row in table] == ["identical" if row[0] in SPECULATIVE else "-" for row in table]
    shown = ROW.findall(README)
    assert len(shown) == 4 + 2
    assert set(map(repeatable, shown)) <= set(map(repeatable, table)), "the README shows what the demo prints"
    assert list(map(unmarked, THREAD.findall(README))) == list(map(unmarked, THREAD.findall(out)))
    assert len(THREAD.findall(out)) == 4
    assert re.search(r"^check passed: 15 cases, ", out, re.MULTILINE)
    assert "check passed: 15 cases, " in README


def test_what_json_holds_is_what_the_readme_says(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(tiny_bundle), "a", "--json", "--max-tokens", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    table = README[README.index("| entry |") :].split("\n\n")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines()[2:]]
    names = [name for cell, _ in rows for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(names) == sorted(found)
    ((_, threads),) = (row for row in rows if "`threads`" in row[0])
    assert set(re.findall(r"`([a-z]+)`", threads)) == set(found["threads"][0])
