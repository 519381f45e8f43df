"""`spaceport bench decode` and `bench chat`: tables, JSON, files and exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spaceport.tools.bench.chat import peers
from spaceport.tools.bench.compare.subjects import Peer
from spaceport.tools.bench.compare.work_folder import Environments
from spaceport.tools.bench.decode.summary import REPLAY_LABEL
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import ACCURACY, OK
from support.fake_subjects import FAKE, installed
from support.paths import DEMO, TINY
from support.planted import ignore_the_mask, planted

Capture = pytest.CaptureFixture[str]
pytestmark = [pytest.mark.on_change("tests/support/fake_runtime.py"), pytest.mark.slow]
EXPLAIN = "Explain the parameters of {}"
LIST = EXPLAIN.format("triangular( low = 0.0, high = 1.0, mode = None )")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two kinds and a conversation of two turns."""
    texts = [[LIST], [EXPLAIN.format("move( src, dst )")], ["import os", "def f(x):"]]
    turns = [[{"role": "user", "content": text} for text in one] for one in texts]
    lines = [{"kind": kind, "messages": one} for kind, one in zip(("lists", "lists", "code"), turns, strict=True)]
    return written(tmp_path / "chat.jsonl", *lines)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    found = list(json.loads((TINY / "prompts.json").read_text("utf-8")).values())[:2]
    return written(tmp_path / "prompts.jsonl", *({"text": text} for text in found))


def written(file: Path, *lines: object) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return file


def decode(bundle: Path, *more: object) -> list[str]:
    message = ("bench", "decode", bundle, "--threads", 1, "--max-tokens", 16, "--rounds", 1, *more)
    return [str(one) for one in message]


def chat(bundle: Path, prompts: Path, *more: object) -> list[str]:
    return [str(one) for one in ("bench", "chat", bundle, prompts, "--max-tokens", 12, "--rounds", 1, *more)]


def test_modes_kinds_drafts_and_forks_are_reported(
    demo_bundle: Path, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "chat.md"
    command = chat(demo_bundle, prompts, "--sample", 1, "--fixed", "2", "--fork-max-tokens", 64)
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
    assert run(chat(tiny_bundle, file, "--modes", "lookup", "--fixed", "0")) == OK
    out, err = capsys.readouterr()
    assert "### Acceptance of" not in out
    assert "### Forked threads" not in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith(("| plain |", "| lookup |"))] == [
        "plain",
        "lookup",
    ]
    assert "2 prompts, 2 modes and runtimes, 1 rounds: at most" in err


def test_other_runtimes_answer_the_same_prompts(
    demo_bundle: Path, prompts: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Environments(tmp_path / "work")
    installed(work, "transformers")
    log = tmp_path / "calls.txt"
    fake = Peer("fake", "transformers", str(FAKE), (), "none", {"step": 10.0, "log": str(log)})
    monkeypatch.setattr(peers, "PEERS", (fake, replace(fake, name="broken", options={"step": 1.0, "fails": "answer"})))
    command = chat(demo_bundle, prompts, "--checkpoint", DEMO, "--work", work.folder, "--peer-sample", 1)
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


def test_every_mode_and_temperature_is_reported(
    tiny_bundle: Path, texts: Path, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "decode.md"
    command = decode(tiny_bundle, texts, "--temperatures", "0,0.8,0", "--fixed", "2,2", "--markdown", file)
    assert run([*command, "--plot", str(tmp_path / "decode.svg")]) == OK
    out, err = capsys.readouterr()
    assert file.read_text("utf-8") == out
    assert (tmp_path / "decode.svg").read_text("utf-8").startswith("<svg ")
    modes = ["plain", "lookup", "masks", "default", "fixed 2"]
    lines = [line.split(" | ")[:2] for line in out.splitlines() if line.endswith((" reference |", " same as plain |"))]
    assert lines == [[f"| {mode}", heat] for heat in ("0", "0.8") for mode in modes]
    assert out.splitlines()[-1] == "- All 32 compared completions are identical."
    assert "round 1 of 1, temperature 0.8" in err


def test_forked_completions_are_compared_with_forked_ones(demo_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    file = written(tmp_path / "prompts.jsonl", {"prompt": LIST})
    assert run(decode(demo_bundle, file, "--modes", "forked+drafted", "--max-tokens", 48, "--json")) == OK
    modes = {mode["mode"]: mode for mode in json.loads(capsys.readouterr().out)["modes"]}
    references = {"plain": None, "forked": None, "forked+drafted": "forked"}
    assert {name: mode["reference"] for name, mode in modes.items()} == references
    assert modes["forked"]["tokens_per_step"] > 1.1 > modes["plain"]["tokens_per_step"]
    assert (modes["forked+drafted"]["compared"], modes["forked+drafted"]["different"]) == (2, 0)


def test_only_json_is_printed_to_stdout(tiny_bundle: Path, texts: Path, capsys: Capture) -> None:
    assert run(decode(tiny_bundle, texts, "--modes", "default", "--requests", 3, "--limit", 1, "--json")) == OK
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["identical"], found["prompts"]) == ("measured", True, 1)
    plain, default = found["modes"]
    assert default["compared"] == 6  # three requests of the one prompt, in the warm-up and in the round
    assert [prompt["line"] for prompt in default["prompts"]] == [1]
    assert default["speedup"]["low"] <= default["speedup"]["mean"] <= default["speedup"]["high"]
    assert 0 < plain["first_token_p50"] <= plain["first_token_p95"]
    assert 0 < default["outside_share"] < 1


def test_a_replay_is_labelled(tiny_bundle: Path, texts: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "replay.md"
    assert run(decode(tiny_bundle, "--replay", "0.7,0.7", "--limit", 2, "--json", "--markdown", file)) == OK
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["label"], found["options"]["replay"]) == ("replay", REPLAY_LABEL, [0.7, 0.7])
    assert file.read_text("utf-8").startswith(f"**{REPLAY_LABEL}** (0.7, 0.7 by depth).\n")
    assert run(decode(tiny_bundle, texts, "--replay", "0.7", "--json")) == OK
    lengths = [prompt["prompt_tokens"] for prompt in json.loads(capsys.readouterr().out)["modes"][0]["prompts"]]
    assert len(set(lengths)) == 2  # those of the prompts in the file


def test_what_differs_is_reported_with_exit_code_4(
    tiny_bundle: Path, texts: Path, tmp_path: Path, capsys: Capture
) -> None:
    wrong = planted(tiny_bundle, tmp_path / "wrong", ignore_the_mask)
    assert run(decode(wrong, texts)) == ACCURACY
    out = capsys.readouterr().out
    assert " DIFFER |" in out
    assert "compared completions DIFFER; `spaceport audit` separates rounding from faults:" in out
    assert "  - line 2, temperature 0, warm-up, token " in out
    assert run(chat(wrong, written(texts, {"text": "ab ab ab"}), "--modes", "default")) == ACCURACY
    out = capsys.readouterr().out
    assert "compared answers DIFFER; `spaceport audit` separates rounding from faults:" in out
    assert "  - line 1, temperature 0, round 1, token " in out
    assert " (answer 1)" in out
