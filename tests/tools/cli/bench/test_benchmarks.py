"""`spaceport bench`: both benchmarks have consistent results, tables, files, exit codes and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from spaceport.tools.cli import ACCURACY, OK, run
from support.paths import TINY
from support.planted import ignore_the_mask, planted

Capture = pytest.CaptureFixture[str]
pytestmark = [pytest.mark.on_change("verify"), pytest.mark.slow]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    found = list(json.loads((TINY / "prompts.json").read_text("utf-8")).values())[:2]
    (file := tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in found), "utf-8"
    )
    return file


def bench(name: str, *arguments: object) -> int:
    """The exit code of a benchmark."""
    return run(["bench", name, *map(str, arguments)])


def test_steps_are_timed_on_each_backend_and_while_decoding(tiny_bundle: Path, capsys: Capture) -> None:
    options = "--rows 1,4 --rounds 2 --context 20 --threads 1 --backend auto --backend onnxruntime --without-graphs"
    assert bench("steps", tiny_bundle, *options.split(), "--json") == OK
    found = json.loads(capsys.readouterr().out)["backends"]
    assert [(one["backend"], one["graphs"], one["device"]) for one in found] == [("onnxruntime", False, "cpu")] * 2
    for one in found:
        first, second = one["steps"]
        assert (first["rows"], first["ratio"], second["rows"]) == (1, 1.0, 4)
        assert [loop["mask_slots"] for loop in one["loops"]] == [0, 5]
        assert all(loop["engine_milliseconds"] > 0 < loop["outside_milliseconds"] for loop in one["loops"])
    assert bench("steps", tiny_bundle, *options.split()[:8]) == OK
    out = capsys.readouterr().out
    assert "### Milliseconds of a step after 20 tokens, by number of rows (ratio to the first)" in out
    assert re.search(r"^\| onnxruntime \| [\d.]+ \(1\.00\) \| [\d.]+ \([\d.]+\) \| cpu \|$", out, re.MULTILINE)


def decode(bundle: Path, *more: object) -> list[str]:
    message = ("decode", bundle, "--threads", 1, "--max-tokens", 16, "--rounds", 1, *more)
    return [str(one) for one in message]


def test_every_mode_and_temperature_is_reported(tiny_bundle: Path, texts: Path, capsys: Capture) -> None:
    assert bench(*decode(tiny_bundle, texts, "--temperatures", "0,0.8,0", "--fixed", "2,2")) == OK
    out, err = capsys.readouterr()
    modes = ["plain", "lookup", "masks", "default", "fixed 2"]
    lines = [line.split(" | ")[:2] for line in out.splitlines() if line.endswith((" reference |", " same as plain |"))]
    assert lines == [[f"| {mode}", heat] for heat in ("0", "0.8") for mode in modes]
    assert out.splitlines()[-1] == "- All 32 compared completions are identical."
    assert "round 1 of 1, temperature 0.8" in err
    work = (
        r" 2 prompts, 5 modes, 1 rounds after a warm-up: about \d+ s if every completion has 16 tokens\n.* warming up, "
    )
    assert re.search(work, err)


def test_what_differs_is_reported_with_exit_code_4(
    tiny_bundle: Path, texts: Path, tmp_path: Path, capsys: Capture
) -> None:
    wrong = planted(tiny_bundle, tmp_path / "wrong", ignore_the_mask)
    assert bench(*decode(wrong, texts)) == ACCURACY
    out = capsys.readouterr().out
    assert " DIFFER |" in out
    assert "compared completions DIFFER; `spaceport audit` separates rounding from faults:" in out
    assert "  - line 2, temperature 0, warm-up, token " in out
