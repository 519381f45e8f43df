"""The commands, programs and examples of the README and of the pages under docs/ run and print what stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from runpy import run_path

import pytest

from spaceport.graphs.contract.manifest import SCHEMA
from spaceport.kernels.native_library import VERSION
from spaceport.tools.cli import run
from support.paths import DOCS, ROOT


def blocks(page: str | Path, kind: str) -> list[str]:
    """The blocks of code of a kind in a page under docs/, or in another page."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", (DOCS / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_the_page_on_bundles_states_the_versions_of_manifests_and_native_operators() -> None:
    page = (DOCS / "bundle.md").read_text("utf-8")
    assert re.findall(r"`schema`, which is (\d+) now|`spaceport`, (\d+) now", page) == [
        (str(SCHEMA), ""),
        ("", str(VERSION)),
    ]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that looks like the root of a checkout."""
    for folder in ("docs", "tools", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def beside_the_bundle(demo_bundle: Path, checkout: Path) -> Path:
    """The same with the demo model's demo.bundle, as the first example makes it."""
    (checkout / "demo.bundle").symlink_to(demo_bundle)
    return checkout


# Page and number of the program in it -> a pattern of what it prints
PROGRAMS = {
    ("decoding.md", 0): r"33 of 48 prompt tokens were reused\n",
    ("sampling.md", 0): "",
    ("sampling.md", 1): "",
    ("sampling.md", 2): r"\(\d+,\) -[\d.]+ (True|False) .+\n",
    ("embedding.md", 0): r"(.*\[(?:end|length): [\d.]+ tokens/step\].*\n){2}",
    ("embedding.md", 1): "",
}


@pytest.mark.parametrize(("page", "number"), PROGRAMS)
def test_a_program_of_a_page_runs(
    page: str, number: int, beside_the_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(blocks(page, "python")[number], page, "exec"), {})
    assert re.fullmatch(PROGRAMS[page, number], capsys.readouterr().out, re.DOTALL)
    if (page, number) == ("embedding.md", 1):
        assert "report_file.js" in (beside_the_bundle / "report.html").read_text("utf-8")


def test_the_command_of_the_page_on_traces_runs(beside_the_bundle: Path) -> None:
    ((command,),) = (block.splitlines() for block in blocks("embedding.md", "console"))
    assert run(["generate", "demo.bundle", "import os", "--max-tokens", "40", *command.split()[-4:]]) == 0
    assert (beside_the_bundle / "trace.json").stat().st_size > 1000


def test_the_command_of_the_page_on_generate_prints_what_the_page_shows(
    beside_the_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = blocks("getting_started.md", "console")[0]
    command, output = block.split("\n", 1)
    assert run(shlex.split(command.removeprefix("$ "))[1:]) == 0
    assert capsys.readouterr().out == output


def test_the_commands_of_the_page_on_the_decode_benchmark_run(
    beside_the_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (beside_the_bundle / "prompts.jsonl").write_text('{"text": "import os"}\n', "utf-8")
    lines = [line for block in blocks("performance.md", "console") for line in block.splitlines()]
    (shown,) = (line.split()[4:] for line in lines if line.startswith("$ spaceport bench decode "))
    assert run(["bench", "decode", *shown, "--rounds", "1", "--max-tokens", "8", "--limit", "1"]) == 0
    table = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    page = (DOCS / "performance.md").read_text("utf-8")
    modes = re.findall(r"^\| `([a-z+]+)` \|", page[page.index("| mode |") :].split("\n\n")[0], re.MULTILINE)
    assert table[2 : 2 + len(modes)] == [f"| {mode}" for mode in modes]


def test_the_commands_of_the_page_on_distill_print_what_the_page_shows(
    beside_the_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks("distill.md", "console")
    first, second, output = block.splitlines()
    (prompt, file) = shlex.split(first.removeprefix("$ echo").replace(">", ""))
    (beside_the_bundle / file).write_text(f"{prompt}\n", "utf-8")
    assert run(shlex.split(second)[2:]) == 0
    assert capsys.readouterr().out.partition(" tokens in ")[0] == output.partition(" tokens in ")[0]  # then times


EXAMPLES = sorted((DOCS / "examples").iterdir())
RUNS = [
    pytest.param(example, id=example.name, marks=[pytest.mark.slow] if example.name[:2] in ("01", "08") else [])
    for example in EXAMPLES
]
SHOWN = re.compile(r"^```console\n\$ ([^\n]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANYTHING = "…"  # stands for what differs from run to run: the rest of a line, or as a line for any lines


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


README = (ROOT / "README.md").read_text("utf-8")
START = (DOCS / "getting_started.md").read_text("utf-8")


def arguments_in(block: str) -> list[list[str]]:
    """The arguments of the commands in a block."""
    lines = [shlex.split(line.removeprefix("$ ")) for line in block.splitlines()]
    assert all(line[0] == "spaceport" for line in lines)
    return [line[1:] for line in lines]


@pytest.mark.torch
@pytest.mark.slow
def test_the_commands_and_the_program_run_one_after_the_other(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use, measure = blocks(ROOT / "README.md", "console")
    for arguments in arguments_in(use + measure):
        assert run(arguments) == 0, capsys.readouterr().err
    assert "report_file.js" in (checkout / "report.html").read_text("utf-8")
    (program,) = blocks(ROOT / "README.md", "python")
    capsys.readouterr()
    exec(compile(program, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert re.search(r"\d+\.\d+$", out, re.MULTILINE)
    assert "src, which is required" in out


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="TensorRT-RTX is there for Linux only")
def test_engines_are_built_and_checked_as_the_page_says(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = blocks("getting_started.md", "console")
    (block,) = (block for block in shown if block.startswith("$ spaceport export "))
    for arguments in arguments_in(block):
        assert run(arguments) == 0, capsys.readouterr().err
    names = sorted(file.name[:4] for file in (checkout / "demo-gpu.bundle" / "engines").iterdir())
    assert names == ["sm80", "sm89"]


ROW = re.compile(
    r"^\w* +(plain|speculative|parallel threads|both) +(\d.*\d) +[\d.]+ +[\d.]+(?: \([\d.]+-[\d.]+\))? +(-|identical|DIFFERENT)$",
    re.MULTILINE,
)
SPECULATIVE = ("speculative", "both")


def repeatable(row: tuple[str, str, str]) -> tuple[str, str, str]:
    """The part of a demo row that is the same on every machine: draft sizes, and so steps, depend on step costs."""
    name, counts, verdict = row
    return name, counts.split()[0] if name in SPECULATIVE else counts, verdict


def headings(text: str) -> set[tuple[str, ...]]:
    """The column headings of the demo's tables."""
    return {tuple(re.split("  +", line)) for line in text.splitlines() if line.startswith("prompt  ")}


@pytest.mark.torch
@pytest.mark.slow
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
    assert re.search(r"^check passed: 15 cases, ", out, re.MULTILINE)
    assert "check passed: 15 cases, " in START
