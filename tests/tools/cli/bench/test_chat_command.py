"""`spaceport bench chat`: its tables, JSON, exit codes and errors."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spaceport.tools.bench.chat import peers
from spaceport.tools.bench.compare.subjects import Peer
from spaceport.tools.bench.compare.work_folder import Environments
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import ACCURACY, INPUT, OK, USAGE
from support.fake_subjects import FAKE
from support.paths import DEMO
from support.planted import ignore_the_mask, planted

Capture = pytest.CaptureFixture[str]
EXPLAIN = "Explain the parameters of {}"
LIST = EXPLAIN.format("triangular( low = 0.0, high = 1.0, mode = None )")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two kinds and a conversation of two turns."""
    user = [[LIST], [EXPLAIN.format("move( src, dst )")], ["import os", "def f(x):"]]
    lines = [
        {"kind": kind, "messages": [{"role": "user", "content": text} for text in texts]}
        for kind, texts in zip(("lists", "lists", "code"), user, strict=True)
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return file


def arguments(bundle: Path, prompts: Path, *more: object) -> list[str]:
    return [str(one) for one in ("bench", "chat", bundle, prompts, "--max-tokens", 12, "--rounds", 1, *more)]


@pytest.mark.slow
def test_modes_kinds_drafts_and_forks_are_reported(
    demo_bundle: Path, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "chat.md"
    command = arguments(demo_bundle, prompts, "--sample", 1, "--fixed", "2", "--fork-max-tokens", 64)
    assert run([*command, "--json", "--markdown", str(file)]) == OK
    found = json.loads(capsys.readouterr().out)
    assert (found["identical"], found["prompts"], found["kinds"]) == (True, 2, ["lists", "code"])
    assert found["compared"] == {"lookup": 3, "masks": 3, "default": 4, "fixed 2": 3, "forked+drafted": 1}
    figures = {(one["subject"], one["kind"]): one for one in found["figures"]}
    names = ["plain", "lookup", "masks", "default", "fixed 2"]
    assert list(figures) == [(name, kind) for name in names for kind in ("lists", "code", "all")]
    chain = figures["fixed 2", "all"]["drafts"]
    assert len(chain["by_depth"]) == 2
    assert chain["by_depth"][0]["drafted"] > chain["by_depth"][1]["accepted"]
    assert chain["mean_acceptance_length"] > 1
    assert figures["plain", "all"]["drafts"] is None
    assert (figures["plain", "code"]["answers"], figures["plain", "code"]["prompts"]) == (2, 1)
    forks = {one["mode"]: one for one in found["forks"]}
    assert list(forks) == ["plain", "default", "forked", "forked+drafted"]
    assert forks["forked"]["threads"] > 1 == forks["plain"]["threads"]
    assert forks["forked"]["complete"] == 1
    assert 0 < found["options"]["rounds"] == 1
    page = file.read_text("utf-8")
    titles = [line[4:] for line in page.splitlines() if line.startswith("### ")]
    assert titles == [
        "Speed by mode",
        "Answer speedup by kind of prompt (95 % interval)",
        "Acceptance of 2 mask slots in every step",
        "Mean acceptance length of planned drafts",
        "Forked threads: lists",
    ]
    assert "- All 14 compared answers are identical to those without drafts." in page


def test_a_model_without_mask_slots_and_forks_has_the_tables_that_apply(
    tiny_bundle: Path, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("ab ab ab\nxy\n", "utf-8")
    assert run(arguments(tiny_bundle, file, "--modes", "lookup", "--fixed", "0")) == OK
    out, err = capsys.readouterr()
    assert "### Acceptance of" not in out
    assert "### Forked threads" not in out
    assert [line.split(" | ")[0] for line in out.splitlines() if line.startswith(("| plain |", "| lookup |"))] == [
        "| plain",
        "| lookup",
    ]
    assert "2 prompts, 2 modes and runtimes, 1 rounds: at most" in err


@pytest.mark.slow
def test_other_runtimes_answer_the_same_prompts(
    demo_bundle: Path, prompts: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Environments(tmp_path / "work")
    work.python("transformers").parent.mkdir(parents=True)
    work.python("transformers").symlink_to(Path(sys.executable))
    work.record_installed("transformers")
    log = tmp_path / "calls.txt"
    fake = Peer("fake", "transformers", str(FAKE), (), "none", {"step": 10.0, "log": str(log)})
    monkeypatch.setattr(peers, "PEERS", (fake, replace(fake, name="broken", options={"step": 1.0, "fails": "answer"})))
    command = arguments(demo_bundle, prompts, "--checkpoint", DEMO, "--work", work.folder, "--peer-sample", 1)
    assert run([*command, "--modes", "default", "--fork-kinds", "", "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert len(log.read_text("utf-8").splitlines()) == 2 * (1 + 3)  # warm-up and three answers, with and without lookup
    ratios = {(one["peer"], one["mode"], one["kind"]): one for one in found["peer_ratios"]}
    assert ratios["fake", "default", "all"]["speedup"]["prompts"] == 2
    assert ratios["fake", "plain", "all"]["speedup"]["mean"] > 10
    assert set(found["failed"]) == {"broken", "broken lookup"}
    assert found["forks"] == []
    assert run([*command, "--modes", "default"]) == OK
    out = capsys.readouterr().out
    assert "| fake lookup | 2 |" in out
    assert "- broken: failed: its process ended" in out
    assert "Speed of `default` relative to other runtimes by kind of prompt" in out


def test_an_answer_that_differs_is_reported_with_exit_code_4(
    tiny_bundle: Path, tmp_path: Path, capsys: Capture
) -> None:
    wrong = planted(tiny_bundle, tmp_path / "wrong", ignore_the_mask)
    file = tmp_path / "prompts.txt"
    file.write_text("ab ab ab\n", "utf-8")
    assert run(arguments(wrong, file)) == ACCURACY
    out = capsys.readouterr().out
    assert "compared answers DIFFER; `spaceport audit` separates rounding from faults:" in out
    assert "  - line 1, temperature 0, round 1, token " in out
    assert " (answer 1)" in out


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--max-tokens", 0], USAGE, "--max-tokens is 0: expected at least 1"),
        (["--sample", 0], USAGE, "--sample is 0: expected at least 1"),
        (["--rounds", 0], USAGE, "--rounds is 0: expected at least 1"),
        (["--seed", -1], USAGE, "--seed is -1: expected at least 0"),
        (["--threads", 0], USAGE, "--threads is 0: expected at least 1"),
        (["--modes", "masks,all"], USAGE, "--modes names 'all': expected names among plain, lookup, masks, default"),
        (["--modes", "forked"], USAGE, "forked threads are measured on --fork-kinds"),
        (["--fixed", "9"], USAGE, "--fixed names 9: expected 1 to the number of mask slots"),
        (["--max-tokens", 5000], INPUT, "line 1: "),
        (["--work", "folder"], USAGE, "--work has no effect without other runtimes: add --checkpoint FOLDER"),
        (["--checkpoint", DEMO], USAGE, "no --work: expected the folder with the environments"),
        (["--checkpoint", DEMO, "--work", "w", "--peer-sample", 0], USAGE, "--peer-sample is 0: expected at least 1"),
        (["--markdown", "none/chat.md"], USAGE, "does not exist: create it first"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(
    demo_bundle: Path, prompts: Path, capsys: Capture, more: list[object], code: int, message: str
) -> None:
    assert run(arguments(demo_bundle, prompts, *more)) == code
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert "modes and runtimes" not in err
