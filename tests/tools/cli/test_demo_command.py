"""`spaceport demo`: the table compares speculative runs with plain ones and reports every difference; `--code`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spaceport.graphs.contract.faults import InputFault
from spaceport.runtime.comparison import TokenDifference
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.decode_measuring import (
    PLAIN,
    DecodeMeasurements,
    DecodeMode,
    MeasuredCompletion,
    OutputDifference,
    measure_modes,
)
from spaceport.tools.cli import INTERRUPTED, demo, run
from spaceport.tools.cli.bundle_cache import CachedBundle
from spaceport.tools.cli.demo import answer_code, answered, compare, program_and, rows_of
from spaceport.tools.demo.prompts import prompts_of
from support.adapters import train
from support.gguf_files import random_model, stored_tensors, write_gguf
from support.paths import TINY
from support.small_bundle import forking_copy

DECODER: str = json.loads((TINY / "prompts.json").read_text("utf-8"))["begin of json/decoder.py"]

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    bundle = forking_copy(tiny_bundle, tmp_path_factory.mktemp("forking") / "bundle")
    with Runtime.open(bundle, threads=1, max_seq_len=256, step_costs="free") as opened:
        yield opened


def test_a_text_that_forks_has_four_rows_and_differences_are_shown_where_they_are(
    runtime: Runtime, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(*given: Any) -> DecodeMeasurements:
        measured = measure_modes(*given)
        measured.differences.append(different)
        return measured

    different = OutputDifference("forked+drafted", "forked", 0.0, 1, 0, TokenDifference((0,), 9, 6, None, 99))
    assert compare(runtime, {"forks": DECODER}, 60)
    monkeypatch.setattr(demo, "measure_modes", planted)
    assert not compare(runtime, {"forks": DECODER, "short": DECODER}, 60)
    outputs = ("-", "identical", "DIFFERENT")
    rows = [row for line in capfd.readouterr().out.splitlines() if (row := line.split()) and row[-1] in outputs]
    same = ["-", "identical", "-", "identical"]
    assert [row[-1] for row in rows] == [*same, "-", "identical", "-", "DIFFERENT", *same]
    (_, plain, tokens, steps, *_), (speculative, drafted, fewer, *_) = rows[:2]
    assert (plain, speculative) == ("plain", "speculative")
    assert tokens == drafted
    assert int(fewer) < int(steps)


def test_a_row_shows_the_median_speedup_within_rounds() -> None:
    plain, both = modes = [DecodeMode(PLAIN, Decoding(), PLAIN), DecodeMode("default", Decoding(), PLAIN)]
    seconds = {plain: (1.0, 2.0, 3.0, 4.0), both: (0.5, 0.5, 3.0, 1.0)}
    measured = DecodeMeasurements()
    for mode, times in seconds.items():
        for number, taken in enumerate(times, 1):
            statistics = Statistics(steps=6, tokens=12, threads=1, seconds=taken)
            measured.completions.append(MeasuredCompletion(mode.name, 0.0, number, 0, statistics))
    first, row = rows_of("name", 0, modes, measured)
    assert (first[0], first[6], first[7]) == ("name", "1.00", "-")
    assert row == ("", "speculative", 12, 6, 2.0, 12 * (2 + 1) / 2, "3.00 (1.00-4.00)", "identical")


def code_demo(bundle: Path, kept: Path) -> bool:
    """The demo of code with a bundle that was exported before, kept at another path."""
    cached = CachedBundle(bundle, Path("Coder-0.5B.gguf"), None, {}, None)
    return answer_code(cached, {"edit": "Edit import json", "ask": "Why?"}, max_tokens=8, threads=1, kept=kept)


def test_each_coding_prompt_is_answered_plain_and_drafted(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code_demo(tiny_bundle, tmp_path / "kept here")
    shown = capfd.readouterr()
    assert f"using {tiny_bundle}, which was exported before" in shown.err
    assert "opening the model, measuring steps" in shown.err
    first, second = shown.out.split("== 2 of 2: ask ==")
    assert first.startswith("\n== 1 of 2: edit ==\nEdit import json\n\n-- plain --\n")
    plain, drafted = first.split("\n-- drafted --\n")
    answer = plain.split("-- plain --\n")[1].rsplit("\n-- 8 tokens in ", 1)[0]
    assert drafted.rsplit("\n-- 8 tokens in ", 1)[0] == answer
    table, following = second.split("\nprompt ")[1].split("\n\n")
    assert [(line.split()[0], line.split()[-1]) for line in table.splitlines()[1:]] == [
        ("edit", "identical"),
        ("ask", "identical"),
    ]
    assert " serve Coder-0.5B='kept here'\n" in following


def test_a_drafted_answer_that_differs_is_reported(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    def other(runtime: Runtime, prompt: Prompt, decoding: Decoding, title: str) -> Completion:
        completion = answered(runtime, prompt, decoding, title)
        assert (title, decoding.mask_slots) in (("plain", 0), ("drafted", None))
        return replace(completion, tokens=(5, *completion.tokens[1:])) if title == "drafted" else completion

    monkeypatch.setattr(demo, "answered", other)
    assert not code_demo(tiny_bundle, tiny_bundle)
    assert capfd.readouterr().out.count("DIFFERENT") == 2


@pytest.mark.nightly
def test_the_coding_demo_exports_once_with_an_adapter(tmp_path: Path, capfd: Capture) -> None:
    file, model = tmp_path / "tiny.gguf", random_model()
    matrices = [name for name, weight in stored_tensors(model).items() if weight.ndim > 1]
    write_gguf(file, model, dict.fromkeys(matrices, "Q8_0"))
    adapter = train(file, tmp_path / "adapter")
    arguments = ["demo", "--code", str(file), "--adapter", str(adapter), "--max-tokens", "8"]
    arguments += ["--cache", str(tmp_path / "cache"), "--prompt", "import json"]
    assert run(arguments) == 0
    first = capfd.readouterr()
    assert "writing the graph and its weights as stored" in first.err
    assert first.out.count("identical") == 1
    (bundle,) = (tmp_path / "cache").glob("*/")
    assert run(arguments) == 0
    again = capfd.readouterr()
    assert f"using {bundle}, which was exported before" in again.err
    assert "writing the graph" not in again.err


def test_the_demo_names_the_program_as_it_is_typed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    assert program_and(tmp_path / "a b") == ("bin/python -m spaceport", "'a b'")
    (tmp_path / "spaceport").touch(0o755)
    assert program_and(tmp_path / "b")[0] == "spaceport"


@pytest.mark.torch
def test_a_check_that_was_interrupted_is_repeated_without_another_export(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    def export(checkpoint: Path, target: Path, options: object, **others: object) -> None:
        shutil.copytree(tiny_bundle, target)

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    arguments = ["demo", str(TINY), "--prompt", "import json", "--cache", str(tmp_path), "--max-tokens", "4"]
    monkeypatch.setattr("spaceport.exporter.export.export", export)
    with monkeypatch.context() as patched:
        patched.setattr(demo, "check", killed)
        assert run(arguments) == INTERRUPTED
    assert "exporting " in capfd.readouterr().err
    assert run(arguments) == 0
    first = capfd.readouterr()
    assert "check passed: " in first.out
    assert "recorded" in first.err
    assert "exporting " not in first.err
    monkeypatch.setattr(demo, "check", killed)  # not called
    assert run(arguments) == 0
    assert "which passed the check when it was exported" in capfd.readouterr().out


@pytest.mark.parametrize("content", ["{}", "[1]", "{", '{"a": 3}', '{"a": {"text": "b"}}'])
def test_prompts_of_another_form_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "prompts.json").write_text(content, "utf-8")
    with pytest.raises(InputFault, match=r"has other content .*: expected an object of names and prompts"):
        prompts_of(tmp_path)
