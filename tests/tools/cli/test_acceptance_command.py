"""The acceptance command: equal numbers for a checkpoint and its bundles, its table, plots and errors."""

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
from spaceport.tools.cli.acceptance import command
from support.paths import TINY

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


def call(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def numbers(*arguments: object) -> dict[str, Any]:
    result = call(*arguments, "--json")
    if result.exception:
        raise result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_checkpoint_and_its_bundles_have_the_same_acceptance(
    tmp_path: Path, tiny_bundle: Path, tiny_append_bundle: Path
) -> None:
    file = data_file(tmp_path, *LINES)
    ours = numbers(TINY, file, "--max-tokens", 40)
    assert ours == numbers(tiny_bundle, file, "--max-tokens", 40, "--threads", 1)
    assert ours == numbers(tiny_append_bundle, file, "--max-tokens", 40, "--threads", 1)
    assert (ours["samples"], ours["mask_slots"], ours["forks"]) == (3, 5, None)
    assert ours["generated"]["accuracy"][0] == 1.0
    assert ours["reference"]["predictions"][0] - ours["reference"]["tokens"] == 3  # the end tokens
    assert ours["generated"]["tokens_per_step"][5] > 1.5


@pytest.mark.torch
def test_forks_are_counted_in_reference_answers_with_and_without_threads(tmp_path: Path) -> None:
    checkpoint = tmp_path / "forking"
    shutil.copytree(TINY, checkpoint, ignore=shutil.ignore_patterns("__pycache__"))
    config = {"mask_tokens": ["[M]"], "mask_slots": 2, "fork_token": str(FORK), "child_token": str(CHILD)}
    (checkpoint / "sar_config.json").write_text(json.dumps(config))
    items = [f"{number}. Item: a detail that is long enough" for number in (1, 2, 3)]
    file = data_file(tmp_path, chat("List three.", "\n".join(items)), LINES[2])
    found = numbers(checkpoint, file, "--max-tokens", 8)
    assert found["forks"]["expected"] == 3
    assert found["reference"]["segments"] == 1 + 3 + 1
    assert found["forks"]["positions"] < found["reference"]["predictions"][0]
    assert found["forks"]["recall"] == 0.0
    shown = call(checkpoint, file, "--max-tokens", 8).stdout
    assert "3 expected, 0 predicted, 0 correct (precision -, recall 0.0 %)" in shown


@pytest.mark.torch
def test_saved_rates_are_those_along_generated_answers(tmp_path: Path) -> None:
    checkpoint = shutil.copytree(TINY, tmp_path / "tiny", ignore=shutil.ignore_patterns("__pycache__"))
    before = json.loads((checkpoint / "sar_config.json").read_text("utf-8"))
    file = data_file(tmp_path, *LINES)
    found = numbers(checkpoint, file, "--max-tokens", 40, "--save")
    entries = json.loads((checkpoint / "sar_config.json").read_text("utf-8"))
    (measured,) = entries.pop("acceptance")
    assert entries == before
    rates, generated = measured["rates"], found["generated"]
    assert rates == [round(rate, 4) for rate in accumulate(generated["acceptance"], min)]
    assert (measured["tokens"], measured["data"], measured["temperature"]) == (generated["tokens"], "data.jsonl", 0.0)
    tried, accepted = found["lookup_tokens"]["tokens"], found["lookup_tokens"]["accepted"]
    assert sum(tried) > 0
    for rate, count, good in zip(measured["lookup"], tried, accepted, strict=True):
        assert good / (count + 10) <= rate <= (good + 10) / (count + 10)
    numbers(checkpoint, file, "--max-tokens", 8, "--save", "--limit", 1)
    (newer,) = json.loads((checkpoint / "sar_config.json").read_text("utf-8"))["acceptance"]
    assert newer["tokens"] < measured["tokens"]


def test_rates_are_not_saved_where_they_cannot_be(tmp_path: Path, tiny_bundle: Path) -> None:
    file = data_file(tmp_path, *LINES)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    before = (tiny_bundle / "manifest.json").read_bytes()
    for models, message in (
        ([tiny_bundle], "--save with the bundle .*: expected a checkpoint, .*, and export it again"),
        ([tmp_path / "model.gguf"], "--save with the file .*: expected a checkpoint folder, or --adapter"),
        ([TINY, TINY], "--save with several models: expected one CHECKPOINT with it"),
    ):
        result = call(*models, file, "--save")
        assert isinstance(result.exception, OptionFault)
        with pytest.raises(OptionFault, match=message):
            raise result.exception
    assert (tiny_bundle / "manifest.json").read_bytes() == before


def test_the_table_and_the_plots_show_every_mask_slot(tmp_path: Path, tiny_bundle: Path) -> None:
    file = data_file(tmp_path, *LINES)
    options = ("--max-tokens", 8, "--limit", 1, "--max-mask-slots", 3, "--plot")
    plots = [tmp_path / "plot.png", tmp_path / "plot.svg"]
    lines, same = (call(tiny_bundle, file, *options, plot).stdout.splitlines() for plot in plots)
    assert lines == same
    assert lines[0].startswith("1 samples (1 unforked), 8 generated tokens, ")
    assert [line.split("  ")[0] for line in lines[2:6]] == ["next token", "mask slot 1", "mask slot 2", "mask slot 3"]
    assert plots[0].read_bytes().startswith(b"\x89PNG")
    assert xml.etree.ElementTree.parse(plots[1]).getroot().tag.endswith("svg")


def test_an_answer_beyond_the_context_is_truncated_and_counted(tmp_path: Path, tiny_bundle: Path) -> None:
    file = data_file(tmp_path, chat("What?", "one two three " * 60))
    found = numbers(tiny_bundle, file, "--max-tokens", 8, "--max-seq-len", 64)
    assert found["counts"] == {"truncated at the cutoff": 1, "unforked": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "0"], "--limit is 0: expected at least 1"),
        (["--max-tokens", "0"], "--max-tokens is 0: expected at least 1"),
        (
            ["--max-tokens", "1024"],
            "--max-tokens is 1024, which leaves no tokens for the prompt in a context of 1024: lower it",
        ),
        (["--max-mask-slots", "6"], "--max-mask-slots is 6: expected 1 to 5"),
        (["--max-seq-len", "1"], "max_seq_len is 1: expected 2 to 1024"),
        (["--plot", "a.pdf"], "--plot is a.pdf: expected a file name that ends in .svg or .png"),
        (["--plot", "no/folder.png"], "--plot is no/folder.png: expected a file name in an existing folder"),
        (["--threads", "-1"], "threads is -1: expected 0"),
    ],
)
def test_an_invalid_option_is_an_error(tmp_path: Path, tiny_bundle: Path, options: list[str], message: str) -> None:
    result = call(tiny_bundle, data_file(tmp_path, *LINES), *options)
    assert isinstance(result.exception, OptionFault)
    assert message in str(result.exception)


def test_a_checkpoint_accepts_no_backend(tmp_path: Path) -> None:
    result = call(TINY, data_file(tmp_path, *LINES), "--backend", "onnxruntime")
    assert isinstance(result.exception, OptionFault)
    assert "is a checkpoint and runs in PyTorch: leave --backend out" in str(result.exception)


@pytest.mark.torch
def test_a_model_without_mask_slots_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(TINY, plain, ignore=shutil.ignore_patterns("__pycache__", "sar_config.json"))
    result = call(plain, data_file(tmp_path, *LINES))
    assert isinstance(result.exception, InputFault)
    assert "has no mask token and no heads, so there are no draft tokens" in str(result.exception)
    assert "spaceport tune" in str(result.exception)


def test_folders_and_data_that_cannot_be_read_are_errors(tmp_path: Path, tiny_bundle: Path) -> None:
    for model, lines, message in (
        (tmp_path, LINES, "expected a checkpoint .* or a bundle"),
        (tmp_path / "none", LINES, "expected a checkpoint .* or a bundle"),
        (tiny_bundle, (), "contains no conversation"),
        (tiny_bundle, ({"text": ""},), "line 1"),
        (tiny_bundle, (chat("What is [M]?", "A mask."),), r"none of its|no answer of its 1 conversations .*1 dropped"),
    ):
        result = call(model, data_file(tmp_path, *lines))
        assert isinstance(result.exception, InputFault)
        with pytest.raises(InputFault, match=message):
            raise result.exception
