"""The acceptance command: equal numbers for a checkpoint and its bundles, tables, plots, saved rates and errors."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.tools.cli import cli
from support.paths import TINY
from support.published_methods import METHODS, SLOTS, exact_data

FORK, CHILD = 630, 631  # rows of the tiny model that no text uses


def data_file(folder: Path, *lines: dict[str, Any]) -> Path:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return file


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


LINES = (
    chat("How does json/scanner.py begin?", '"""JSON token scanner\n"""\nimport re\ntry:\n'),
    {"text": "import re\n\nFLAGS = re.VERBOSE | re.MULTILINE | re.DOTALL\n\nNaN = float('nan')\n" * 3},
    chat("What is JSON?", "A format."),
)


def call(*arguments: object, command: str = "acceptance") -> Result:
    return CliRunner().invoke(cli, [command, *map(str, arguments)])


def numbers(*arguments: object, command: str = "acceptance") -> dict[str, Any]:
    result = call(*arguments, "--json", command=command)
    if result.exception:
        raise result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def tiny_copy(folder: Path, **config: Any) -> Path:
    """The tiny checkpoint with another draft configuration, or without one."""
    copy = shutil.copytree(TINY, folder / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "sar_config.json").unlink()
    if config:
        (copy / "sar_config.json").write_text(json.dumps(config))
    return copy


def test_a_checkpoint_and_its_bundles_have_the_same_acceptance_alone_and_in_a_table(
    tmp_path: Path, tiny_bundle: Path, tiny_append_bundle: Path
) -> None:
    file = data_file(tmp_path, *LINES)
    ours = numbers(TINY, file, "--max-tokens", 40)
    assert ours == numbers(tiny_bundle, file, "--max-tokens", 40, "--threads", 1)
    assert (ours["samples"], ours["mask_slots"], ours["forks"]) == (3, 5, None)
    assert ours["generated"]["accuracy"][0] == 1.0
    assert ours["reference"]["predictions"][0] - ours["reference"]["tokens"] == 3  # the end tokens
    assert ours["generated"]["tokens_per_step"][5] > 1.5
    models = [tiny_bundle, tiny_append_bundle]
    rows = numbers(*models, file, "--max-tokens", 40, "--threads", 1)["models"]
    assert [row["model"] for row in rows] == [str(model) for model in models]
    assert ours.pop("max_tokens") == 40
    for row in rows:
        assert ours.items() <= row.items()
        assert row["lookup"]["tokens"] == row["together"]["tokens"] == row["generated"]["tokens"]
        assert row["together"]["steps"] <= row["lookup"]["steps"]


def test_the_tables_and_the_plots_show_every_mask_slot(tmp_path: Path, tiny_bundle: Path) -> None:
    file = data_file(tmp_path, *LINES)
    options = ("--max-tokens", 8, "--limit", 1, "--max-mask-slots", 3, "--threads", 1)
    plots = [tmp_path / "plot.png", tmp_path / "plot.svg"]
    lines, same = (call(tiny_bundle, file, *options, "--plot", plot).stdout.splitlines() for plot in plots)
    assert lines == same
    assert lines[0].startswith("1 samples (1 unforked), 8 generated tokens, ")
    assert [line.split("  ")[0] for line in lines[2:6]] == ["next token", "mask slot 1", "mask slot 2", "mask slot 3"]
    assert plots[0].read_bytes().startswith(b"\x89PNG")
    assert xml.etree.ElementTree.parse(plots[1]).getroot().tag.endswith("svg")
    lines = call(tiny_bundle, tiny_bundle, file, *options).stdout.splitlines()
    names = "model method drafts exact own lookup together depth 1 depth 2 depth 3"
    assert lines[1].split() == names.split()
    assert lines[2].split()[1:7] == ["unknown", "3", "mask", "slots", "100.0", "%"]


@pytest.mark.nightly
def test_one_table_has_every_method_and_their_drafts_change_no_text(tmp_path: Path) -> None:
    bundles = {name: tmp_path / f"{name}.bundle" for name in METHODS}
    for name, build in METHODS.items():
        model = build(tmp_path)
        weights = [] if model.weights is None else ["--adapter", model.weights]
        assert call(model.base, bundles[name], *weights, *model.options, command="export").exit_code == 0
    given = (*bundles.values(), exact_data(tmp_path / "data.jsonl"), "--max-tokens", 33, "--threads", 1)
    rows = numbers(*given)["models"]
    assert [row["method"] for row in rows] == list(METHODS)
    for row in rows:
        assert row["generated"]["accuracy"][0] == 1.0
        assert row["generated"]["acceptance"] == [1.0] * SLOTS
        assert row["generated"]["tokens_per_step"][SLOTS] == 33 / (1 + 32 / (SLOTS + 1))
        assert row["together"]["tokens_per_step"] >= max(row["lookup"]["tokens_per_step"], 33 / 9)
    found = numbers(*given, command="audit")
    assert found["passed"]
    for name, audited in zip(METHODS, found["models"], strict=True):
        assert (audited["model"], audited["method"]) == (str(bundles[name]), name)
        assert sum(mode["faults"] for mode in audited["modes"]) == 0
        steps = {(mode["mode"], mode["requests"]): mode["steps"] for mode in audited["modes"]}
        assert steps[f"chain k = {SLOTS}", 1] == 2 * 9


@pytest.mark.torch
def test_forks_are_counted_in_reference_answers_with_and_without_threads(tmp_path: Path) -> None:
    tokens = {"mask_tokens": ["[M]"], "mask_slots": 2, "fork_token": str(FORK), "child_token": str(CHILD)}
    checkpoint = tiny_copy(tmp_path, **tokens)
    items = [f"{number}. Item: a detail that is long enough" for number in (1, 2, 3)]
    file = data_file(tmp_path, chat("List three.", "\n".join(items)), LINES[2])
    found = numbers(checkpoint, file, "--max-tokens", 8)
    assert (found["forks"]["expected"], found["forks"]["recall"]) == (3, 0.0)
    assert found["reference"]["segments"] == 1 + 3 + 1
    assert found["forks"]["positions"] < found["reference"]["predictions"][0]
    shown = call(checkpoint, file, "--max-tokens", 8).stdout
    assert "3 expected, 0 predicted, 0 correct (precision -, recall 0.0 %)" in shown


@pytest.mark.torch
def test_saved_rates_are_those_along_generated_answers(tmp_path: Path) -> None:
    before = json.loads((TINY / "sar_config.json").read_text("utf-8"))
    checkpoint = tiny_copy(tmp_path, **before)
    file = data_file(tmp_path, *LINES)
    found = numbers(checkpoint, file, "--max-tokens", 40, "--save")
    entries = json.loads((checkpoint / "sar_config.json").read_text("utf-8"))
    (measured,) = entries.pop("acceptance")
    assert entries == before
    generated, lookup = found["generated"], found["lookup_tokens"]
    assert measured["rates"] == [round(rate, 4) for rate in accumulate(generated["acceptance"], min)]
    assert (measured["tokens"], measured["data"], measured["temperature"]) == (generated["tokens"], "data.jsonl", 0.0)
    assert sum(lookup["tokens"]) > 0
    for rate, count, good in zip(measured["lookup"], lookup["tokens"], lookup["accepted"], strict=True):
        assert good / (count + 10) <= rate <= (good + 10) / (count + 10)
    numbers(checkpoint, file, "--max-tokens", 8, "--save", "--limit", 1)
    (newer,) = json.loads((checkpoint / "sar_config.json").read_text("utf-8"))["acceptance"]
    assert newer["tokens"] < measured["tokens"]


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ("B", "--limit 0", "--limit is 0: expected at least 1"),
        ("B", "--max-mask-slots 6", "--max-mask-slots is 6: expected 1 to 5"),
        ("B", "--max-seq-len 1", "--max-seq-len is 1: expected 2 to 1024"),
        ("B", "--plot a.pdf", "--plot is a.pdf: expected a file name that ends in .svg or .png"),
        ("B", "--threads -1", "threads is -1: expected 0"),
        ("B", "--save", "expected a checkpoint, "),
        ("TINY", "--backend onnxruntime", "is a checkpoint and runs in PyTorch: leave --backend out"),
        ("GGUF", "--save", "expected a checkpoint folder, or --adapter"),
        ("TINY TINY", "--save", "--save with several models: expected one CHECKPOINT with it"),
        ("B B", "--plot a.svg", "--plot with several models: expected"),
        ("B TINY", "--adapter folder", "--adapter with several models: expected one"),
        ("B B", "--max-tokens 1024", "leaves no tokens for the prompt in a context"),
        ("B B", "--max-seq-len 5000", "is 5000: expected 2 to 1024"),
    ],
)
def test_an_invalid_option_is_an_error_before_a_model_is_measured(
    tmp_path: Path, tiny_bundle: Path, models: str, options: str, message: str
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    paths = {"B": tiny_bundle, "TINY": TINY, "GGUF": tmp_path / "model.gguf"}
    before = (tiny_bundle / "manifest.json").read_bytes()
    result = call(*(paths[name] for name in models.split()), data_file(tmp_path, *LINES), *options.split())
    assert isinstance(result.exception, OptionFault)
    assert message in str(result.exception)
    assert "opening" not in result.output or " " not in models
    assert (tiny_bundle / "manifest.json").read_bytes() == before


@pytest.mark.torch
def test_models_and_data_that_cannot_be_measured_are_errors(tmp_path: Path, tiny_bundle: Path) -> None:
    plain = tiny_copy(tmp_path)
    for models, lines, message in (
        ([tmp_path], LINES, "expected a checkpoint .* or a bundle"),
        ([tiny_bundle, tmp_path / "none"], LINES, "none: expected a checkpoint .* or a bundle"),
        ([plain], LINES, "has no mask token and no heads, so there are no draft tokens.*spaceport tune"),
        ([tiny_bundle], (), "contains no conversation"),
        ([tiny_bundle], ({"text": ""},), "line 1"),
        (
            [tiny_bundle],
            (chat("What is [M]?", "A mask."),),
            r"none of its|no answer of its 1 conversations .*1 dropped",
        ),
    ):
        result = call(*models, data_file(tmp_path, *lines))
        assert isinstance(result.exception, InputFault)
        with pytest.raises(InputFault, match=f"(?s){message}"):
            raise result.exception
