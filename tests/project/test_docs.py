"""The programs and commands of the pages under docs/ run as they are written."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import command as benchmarks
from spaceport.tools.cli import run
from support.paths import DOCS, ROOT


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", (DOCS / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def beside_the_bundle(demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which demo.bundle is the demo model's."""
    (tmp_path / "demo.bundle").symlink_to(demo_bundle)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_programs_of_the_page_on_decoding_run(beside_the_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, cached = blocks("decoding.md", "python")
    assert _run(program)["statistics"].tokens > 0  # whether drafts pay depends on the CPU
    capsys.readouterr()
    _run(cached)
    assert capsys.readouterr().out == "33 of 48 prompt tokens were reused\n"


def test_the_programs_of_the_page_on_sampling_run(beside_the_bundle: Path) -> None:
    sampled, constrained, scored = map(_run, blocks("sampling.md", "python"))
    assert sampled["sampled"].seed is not None
    assert re.fullmatch("[a-z_]{2,12}", constrained["word"].text)
    assert len(scored["score"].logprobs) == len(scored["score"].tokens) - scored["score"].start > 0


def test_the_program_of_the_page_on_embedding_runs(beside_the_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = blocks("embedding.md", "python")[0]
    _run(program)
    assert (
        len(re.findall(r"\[(?:end|length): [\d.]+ tokens/step, acceptance rate \d+%\]", capsys.readouterr().out)) == 2
    )


def test_the_program_and_the_command_of_the_page_on_traces_run(beside_the_bundle: Path) -> None:
    program, (commands,) = blocks("embedding.md", "python")[1], blocks("embedding.md", "console")
    _run(program)
    pages = [(beside_the_bundle / name).read_text("utf-8") for name in ("report.html", "again.html")]
    assert all("report_file.js" in page for page in pages)
    (command,) = commands.splitlines()
    assert run(["generate", "demo.bundle", "import os", "--max-tokens", "40", *command.split()[-4:]]) == 0
    assert (beside_the_bundle / "trace.json").stat().st_size > 1000


def test_the_command_of_the_page_on_generate_prints_what_the_page_shows(
    beside_the_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = blocks("getting_started.md", "console")[0]
    command, output = block.split("\n", 1)
    assert run(shlex.split(command.removeprefix("$ "))[1:]) == 0
    assert capsys.readouterr().out == output


def test_the_json_object_has_the_entries_that_the_page_lists(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(tiny_bundle), "a", "--json", "--max-tokens", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    page = (DOCS / "getting_started.md").read_text("utf-8")
    table = page[page.index("| entry |") :].split("\n\n")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines()[2:]]
    assert sorted(name for cell, _ in rows for name in re.findall(r"`(\w+)`", cell)) == sorted(found)
    ((_, threads),) = (row for row in rows if "`threads`" in row[0])
    assert set(re.findall(r"`([a-z]+)`", threads)) == set(found["threads"][0])


def test_the_commands_of_the_page_on_the_decode_benchmark_run(
    beside_the_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (beside_the_bundle / "prompts.jsonl").write_text('{"text": "import os"}\n', "utf-8")
    tables = []
    for shown in commands("performance.md", "spaceport bench decode"):
        assert run(["bench", "decode", *shown, "--rounds", "1", "--max-tokens", "8", "--limit", "1"]) == 0
        tables.append([line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("|")])
    page = (DOCS / "performance.md").read_text("utf-8")
    modes = re.findall(r"^\| `([a-z+]+)` \|", page[page.index("| mode |") :].split("\n\n")[0], re.MULTILINE)
    assert tables[0][2 : 2 + len(modes)] == [f"| {mode}" for mode in modes]
    assert tables[1][2:7] == ["| plain", "| default", "| fixed 1", "| fixed 3", "| fixed 5"]


def test_the_commands_of_the_page_on_distill_print_what_the_page_shows(
    beside_the_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks("distill.md", "console")
    first, second, *output, last = block.splitlines()
    (prompt, file) = shlex.split(first.removeprefix("$ echo").replace(">", ""))
    (beside_the_bundle / file).write_text(f"{prompt}\n", "utf-8")
    assert run(shlex.split(second)[2:]) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == output[:-1]  # the last line has times
    assert run(shlex.split(last)[2:]) == 0


@pytest.mark.slow
def test_the_command_of_the_page_on_the_evaluation_runs(
    beside_the_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (beside_the_bundle / "heldout.jsonl").symlink_to(ROOT / "tools" / "demo" / "chat" / "heldout.jsonl")
    (command,) = commands("accuracy.md", "python -m benchmarks chat")
    assert (
        run(
            ["chat", *command, "--rounds", "1", "--max-tokens", "8", "--sample", "1", "--fork-max-tokens", "8"],
            benchmarks,
        )
        == 0
    )
    titles = re.findall("^### (.+)$", capsys.readouterr().out, re.MULTILINE)
    page = (DOCS / "accuracy.md").read_text("utf-8")
    table = page[page.index("| table |") :].split("\n\n")[0]
    listed = re.findall(r"^\| ([A-Z].+?) \|", table, re.MULTILINE)
    assert len(titles) == len(listed)
    for title, name in zip(titles, listed, strict=True):
        assert re.match(re.escape(name).replace("K", r"\d+"), title), title


def commands(page: str, name: str) -> list[list[str]]:
    """Arguments of the commands of that name in a page."""
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    prefix = f"$ {name} "
    return [line.removeprefix(prefix).split() for line in lines if line.startswith(prefix)]


def _run(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(program, "docs", "exec"), names)
    return names
