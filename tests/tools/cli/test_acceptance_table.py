"""Acceptance table: one row per model, for models of every method, beside an audit of the same bundles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, OK, USAGE
from support.paths import TINY
from support.published_methods import METHODS, SLOTS, exact_data

Capture = pytest.CaptureFixture[str]
LIMITS = ("--max-tokens", "33", "--threads", "1")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"text": "import re\n\nFLAGS = re.VERBOSE | re.MULTILINE\n"}) + "\n", "utf-8")
    return file


def report(command: str, models: list[Path], data: Path, capsys: Capture, *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run([command, *map(str, models), str(data), *LIMITS, *options, "--json"]) == OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.nightly
def test_one_table_has_every_method_and_their_drafts_change_no_text(tmp_path: Path, capsys: Capture) -> None:
    bundles = {name: tmp_path / f"{name}.bundle" for name in METHODS}
    for name, build in METHODS.items():
        model = build(tmp_path)
        weights = [] if model.weights is None else ["--adapter", str(model.weights)]
        assert run(["export", str(model.base), str(bundles[name]), *weights, *model.options]) == OK
    data = exact_data(tmp_path / "data.jsonl")
    rows = report("acceptance", list(bundles.values()), data, capsys)["models"]
    assert [row["method"] for row in rows] == list(METHODS)
    for row in rows:
        assert row["generated"]["accuracy"][0] == 1.0
        assert row["generated"]["acceptance"] == [1.0] * SLOTS
        assert row["generated"]["tokens_per_step"][SLOTS] == 33 / (1 + 32 / (SLOTS + 1))
        assert row["together"]["tokens_per_step"] >= max(row["lookup"]["tokens_per_step"], 33 / 9)
    found = report("audit", list(bundles.values()), data, capsys)
    assert found["passed"]
    for name, audited in zip(METHODS, found["models"], strict=True):
        assert (audited["model"], audited["method"]) == (str(bundles[name]), name)
        assert sum(mode["faults"] for mode in audited["modes"]) == 0
        steps = {(mode["mode"], mode["requests"]): mode["steps"] for mode in audited["modes"]}
        assert steps[f"chain k = {SLOTS}", 1] == 2 * 9


def test_a_row_has_the_numbers_of_its_model_alone(
    tiny_bundle: Path, tiny_append_bundle: Path, data: Path, capsys: Capture
) -> None:
    models = [tiny_bundle, tiny_append_bundle]
    rows = report("acceptance", models, data, capsys, "--max-mask-slots", "2")["models"]
    alone = report("acceptance", [tiny_bundle], data, capsys, "--max-mask-slots", "2")
    assert [row["model"] for row in rows] == [str(model) for model in models]
    assert alone.pop("max_tokens") == 33
    for row in rows:
        assert alone.items() <= row.items()
        assert row["lookup"]["tokens"] == row["together"]["tokens"] == row["generated"]["tokens"]
        assert row["together"]["steps"] <= row["lookup"]["steps"]
    assert run(["acceptance", *map(str, models), str(data), *LIMITS]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["model", "method", "drafts", "exact", "own", "lookup", "together"] + [
        word for depth in range(1, 6) for word in ("depth", str(depth))
    ]
    assert lines[2].split()[1:7] == ["unknown", "5", "mask", "slots", "100.0", "%"]


def test_errors_of_any_model_are_reported_before_the_first_is_measured(
    tiny_bundle: Path, tmp_path: Path, data: Path, capsys: Capture
) -> None:
    for models, options, code, message in (
        ([tiny_bundle, tmp_path / "none"], [], INPUT, "none: expected a checkpoint"),
        ([tiny_bundle, TINY], ["--backend", "onnxruntime"], USAGE, "is a checkpoint and runs in PyTorch"),
        (
            [tiny_bundle, tiny_bundle],
            ["--plot", str(tmp_path / "a.svg")],
            USAGE,
            "--plot with several models: expected",
        ),
        ([tiny_bundle, TINY], ["--adapter", str(tmp_path)], USAGE, "--adapter with several models: expected one"),
        ([tiny_bundle, tiny_bundle], ["--max-tokens", "1024"], USAGE, "leaves no tokens for the prompt in a context"),
        ([tiny_bundle, tiny_bundle], ["--max-seq-len", "5000"], USAGE, "is 5000: expected 2 to 1024"),
        ([tiny_bundle, tiny_bundle], ["--max-mask-slots", "0"], USAGE, "--max-mask-slots is 0: expected at least 1"),
    ):
        assert run(["acceptance", *map(str, models), str(data), *options]) == code
        out, errors = capsys.readouterr()
        assert message in errors
        assert "opening" not in errors
        assert out == ""
