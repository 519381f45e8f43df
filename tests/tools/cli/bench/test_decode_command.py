"""`spaceport bench decode`: its output, files, exit codes and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spaceport.tools.bench.decode.summary import REPLAY_LABEL
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import ACCURACY, INPUT, OK, USAGE
from support.paths import TINY
from support.planted import ignore_the_mask, planted

TEXTS = list(json.loads((TINY / "prompts.json").read_text("utf-8")).values())[:2]

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), "utf-8")
    return file


def arguments(bundle: Path, *more: object) -> list[str]:
    message = ("bench", "decode", bundle, "--threads", 1, "--max-tokens", 16, "--rounds", 1, *more)
    return [str(one) for one in message]


def test_every_mode_and_temperature_is_reported(
    tiny_bundle: Path, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "decode.md"
    command = arguments(tiny_bundle, prompts, "--temperatures", "0,0.8,0", "--fixed", "2,2", "--markdown", file)
    assert run([*command, "--plot", str(tmp_path / "decode.svg")]) == OK
    out, err = capsys.readouterr()
    assert file.read_text("utf-8") == out
    assert (tmp_path / "decode.svg").read_text("utf-8").startswith("<svg ")
    modes = ["plain", "lookup", "masks", "default", "fixed 2"]
    lines = [line.split(" | ")[:2] for line in out.splitlines() if line.endswith((" reference |", " same as plain |"))]
    assert lines == [[f"| {mode}", heat] for heat in ("0", "0.8") for mode in modes]
    assert out.splitlines()[-1] == "- All 32 compared completions are identical."
    assert "round 1 of 1, temperature 0.8" in err


def test_forked_completions_are_compared_with_forked_ones(demo_bundle: Path, prompts: Path, capsys: Capture) -> None:
    prompts.write_text(
        json.dumps({"prompt": "Explain the parameters of triangular( low = 0.0, high = 1.0, mode = None )"}), "utf-8"
    )
    assert run(arguments(demo_bundle, prompts, "--modes", "forked+drafted", "--max-tokens", 48, "--json")) == OK
    found = json.loads(capsys.readouterr().out)
    modes = {mode["mode"]: mode for mode in found["modes"]}
    assert {name: mode["reference"] for name, mode in modes.items()} == {
        "plain": None,
        "forked": None,
        "forked+drafted": "forked",
    }
    assert modes["forked"]["tokens_per_step"] > 1.1 > modes["plain"]["tokens_per_step"]
    assert (modes["forked+drafted"]["compared"], modes["forked+drafted"]["different"]) == (2, 0)


def test_only_json_is_printed_to_stdout(tiny_bundle: Path, prompts: Path, capsys: Capture) -> None:
    assert run(arguments(tiny_bundle, prompts, "--modes", "default", "--requests", 3, "--limit", 1, "--json")) == OK
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["identical"], found["prompts"]) == ("measured", True, 1)
    plain, default = found["modes"]
    assert default["compared"] == 6  # three requests of the one prompt, in the warm-up and in the round
    assert [prompt["line"] for prompt in default["prompts"]] == [1]
    assert default["speedup"]["low"] <= default["speedup"]["mean"] <= default["speedup"]["high"]
    assert 0 < plain["first_token_p50"] <= plain["first_token_p95"]
    assert 0 < default["outside_share"] < 1


def test_a_replay_is_labelled(tiny_bundle: Path, prompts: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "replay.md"
    assert run(arguments(tiny_bundle, "--replay", "0.7,0.7", "--limit", 2, "--json", "--markdown", file)) == OK
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["label"], found["options"]["replay"]) == ("replay", REPLAY_LABEL, [0.7, 0.7])
    assert file.read_text("utf-8").startswith(f"**{REPLAY_LABEL}** (0.7, 0.7 by depth).\n")
    assert run(arguments(tiny_bundle, prompts, "--replay", "0.7", "--json")) == OK
    lengths = [prompt["prompt_tokens"] for prompt in json.loads(capsys.readouterr().out)["modes"][0]["prompts"]]
    assert len(set(lengths)) == 2  # those of the prompts in the file


def test_a_completion_that_differs_is_reported_with_exit_code_4(
    tiny_bundle: Path, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    wrong = planted(tiny_bundle, tmp_path / "wrong", ignore_the_mask)
    assert run(arguments(wrong, prompts)) == ACCURACY
    out = capsys.readouterr().out
    assert " DIFFER |" in out
    assert "compared completions DIFFER; `spaceport audit` separates rounding from faults:" in out
    assert "  - line 2, temperature 0, warm-up, token " in out


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        ([], USAGE, "no prompt file: expected PROMPTS, or --replay with acceptance rates"),
        (["none.jsonl"], INPUT, "none.jsonl: No such file or directory: expected a prompt file"),
        (["PROMPTS", "--max-tokens", 5000], INPUT, "line 1: "),
        (["PROMPTS", "--max-tokens", 0], USAGE, "--max-tokens is 0: expected at least 1"),
        (["PROMPTS", "--rounds", 0], USAGE, "--rounds is 0: expected at least 1"),
        (["PROMPTS", "--requests", 0], USAGE, "--requests is 0: expected at least 1"),
        (["PROMPTS", "--limit", 0], USAGE, "--limit is 0: expected at least 1"),
        (["PROMPTS", "--seed", -1], USAGE, "--seed is -1: expected at least 0"),
        (
            ["PROMPTS", "--temperatures", "0,hot"],
            USAGE,
            "--temperatures is '0,hot': expected comma-separated numbers from 0 to 100",
        ),
        (
            ["PROMPTS", "--temperatures", "-1"],
            USAGE,
            "--temperatures is '-1': expected comma-separated numbers from 0 to 100",
        ),
        (["PROMPTS", "--modes", "masks,all"], USAGE, "--modes names 'all': expected comma-separated names"),
        (["PROMPTS", "--modes", "forked"], USAGE, "expected a bundle with a fork token"),
        (["PROMPTS", "--fixed", "0"], USAGE, "--fixed is '0': expected comma-separated whole numbers of at least 1"),
        (["PROMPTS", "--fixed", "9"], USAGE, "--fixed names 9: expected 1 to the number of mask slots"),
        (["PROMPTS", "--context", "9"], USAGE, "--context has no effect with PROMPTS"),
        (["PROMPTS", "--markdown", "none/decode.md"], USAGE, "does not exist: create it first"),
        (["PROMPTS", "--plot", "none/decode.svg"], USAGE, "does not exist: create it first"),
        (["--replay", "0.5,1.1"], USAGE, "--replay is '0.5,1.1': expected comma-separated numbers from 0 to 1"),
        (["--replay", "a"], USAGE, "--replay is 'a': expected comma-separated numbers from 0 to 1"),
        (["--replay", "0.5", "--temperatures", "1"], USAGE, "a replay is greedy"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(
    tiny_bundle: Path, prompts: Path, capsys: Capture, more: list[object], code: int, message: str
) -> None:
    command = arguments(tiny_bundle, *(prompts if one == "PROMPTS" else one for one in more))
    assert run(command) == code
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert "warming up" not in err
