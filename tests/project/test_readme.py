"""The commands and the program of the README and of the page on getting started run as they stand there."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from spaceport.tools.cli import run
from spaceport.tools.report.files import read_trace
from support.paths import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.slow]

README = (ROOT / "README.md").read_text("utf-8")
START = (ROOT / "docs" / "getting_started.md").read_text("utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def block_with(command: str) -> str:
    """The commands on getting started that begin with this one."""
    (found,) = (block for block in blocks(START, "console") if block.startswith(f"$ spaceport {command} "))
    return found


def commands_of(block: str) -> list[list[str]]:
    """The arguments of the commands in a block."""
    lines = [shlex.split(line.removeprefix("$ ")) for line in block.splitlines()]
    assert all(line[0] == "spaceport" for line in lines)
    return [line[1:] for line in lines]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that looks like the root of a checkout to the commands of the README."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    return tmp_path


def test_the_readme_fits_on_few_lines_and_names_what_people_search_for() -> None:
    assert len(README.splitlines()) <= 150
    words = ("self-speculative", "speculative decoding", "prefill", "acceptance rate", "draft token", "KV cache")
    for word in (*words, "prompt lookup", "SAR-SFT", "SPACE", "APAR", "ONNX Runtime", "TensorRT"):
        assert word.lower() in README.lower(), word


def test_the_commands_and_the_program_run_one_after_the_other(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use, measure = blocks(README, "console")
    for arguments in commands_of(use + measure):
        assert run(arguments) == 0, capsys.readouterr().err
    assert "<svg" in (checkout / "steps.svg").read_text("utf-8")
    assert "report_file.js" in (checkout / "report.html").read_text("utf-8")
    (program,) = blocks(README, "python")
    assert len(program.split("\n\n    ")[0].splitlines()) == 5
    capsys.readouterr()
    exec(compile(program, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert re.search(r"\d+\.\d+$", out, re.MULTILINE)
    assert "src, which is required" in out


@pytest.mark.nightly  # docs/examples/07_tuning does most of it in each run
def test_a_model_learns_as_the_page_says(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in commands_of(block_with("tune")):
        assert run(arguments) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "tuned.bundle: llama" in out
    assert "mask slot" in out


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="TensorRT-RTX is there for Linux only")
def test_engines_are_built_and_checked_as_the_page_says(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in commands_of(block_with("export")):
        assert run(arguments) == 0, capsys.readouterr().err
    names = sorted(file.name[:4] for file in (checkout / "demo-gpu.bundle" / "engines").iterdir())
    assert names == ["sm80", "sm89"]


PICTURE = ROOT / "docs" / "steps_and_threads.svg"
DRAW = (  # draws PICTURE; the standard costs make the same request take the same steps on every machine
    "spaceport generate demo.bundle --chat 'Explain the parameters of triangular( low = 0.0, high = 1.0, mode = None )' "
    "--step-costs standard --trace trace.json --picture docs/steps_and_threads.svg"
)


def tokens_in(picture: str) -> list[tuple[str, int]]:
    """The accepted and the other tokens of a picture's cells, in the order of the picture."""
    cells = [part for part in ElementTree.fromstring(picture).iter() if "cell" in part.get("class", "").split()]
    return [(kind, sum(part.get("class") == kind for part in cell)) for cell in cells for kind in ("accepted", "own")]


def test_the_picture_shows_the_accepted_tokens_of_a_real_generation(
    demo_bundle: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "demo.bundle").symlink_to(demo_bundle)
    (checkout / "docs").mkdir()
    assert run(shlex.split(DRAW)[1:]) == 0, capsys.readouterr().err
    shown, current = PICTURE.read_text("utf-8"), (checkout / "docs" / PICTURE.name).read_text("utf-8")
    record = read_trace(checkout / "trace.json")
    rows = [rows for step in record.steps for rows in step.rows]
    assert tokens_in(shown) == tokens_in(current), f"the generation has changed, run: {DRAW}"
    found = tokens_in(shown)
    assert sum(count for kind, count in found if kind == "accepted") == sum(one.accepted for one in rows) > 50
    assert sum(count for kind, count in found if kind == "own") == sum(one.generated - one.accepted for one in rows)
    assert f"]({PICTURE.name})" in START
    assert PICTURE.stat().st_size <= 60_000


ROW = re.compile(
    r"^(plain|speculative|parallel threads|both) +(\d.*\d) +[\d.]+ +[\d.]+(?: \([\d.]+-[\d.]+\))? +(-|identical|DIFFERENT)$",
    re.MULTILINE,
)
SPECULATIVE = ("speculative", "both")


def repeatable(row: tuple[str, str, str]) -> tuple[str, str, str]:
    """The part of a demo row that is the same on every machine: draft sizes, and so steps, depend on step costs."""
    name, counts, verdict = row
    return name, counts.split()[0] if name in SPECULATIVE else counts, verdict


def headings(text: str) -> set[tuple[str, ...]]:
    """The column headings of the demo's tables."""
    return {tuple(re.split("  +", line)) for line in text.splitlines() if line.startswith("decoding  ")}


def test_the_demo_checks_the_graph_and_finds_every_speculative_output_identical(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["demo"]) == 0
    out = capsys.readouterr().out
    table = ROW.findall(out)
    assert len(table) == 4 + 4 + 2
    assert [row[2] for row in table] == ["identical" if row[0] in SPECULATIVE else "-" for row in table]
    shown = ROW.findall(START)
    assert len(shown) == 4 + 2
    assert set(map(repeatable, shown)) <= set(map(repeatable, table)), "the page shows what the demo prints"
    assert headings(START) == headings(out)
    assert re.search(r"^check passed: 15 cases, ", out, re.MULTILINE)
    assert "check passed: 15 cases, " in START
