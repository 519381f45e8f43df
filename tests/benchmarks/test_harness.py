"""Harness of benchmarks: turns in processes, paired ratios, reports, other runtimes' environments and models, and errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from runpy import run_path

import pytest

from benchmarks.__main__ import command
from benchmarks.measuring import ROOT, Measurement, Measurements, Prompt, Subject, Workload, measure, other_subject
from benchmarks.report import results_table, write_result
from benchmarks.runtimes import (
    ENVIRONMENTS,
    RUNTIMES,
    OtherRuntime,
    ProcessFailed,
    WorkFolder,
    conversion,
    convert,
    runtimes_named,
    set_up,
)
from spaceport.tools.cli import ACCURACY, INPUT, OK, USAGE, run
from support.paths import DEMO, DOCS, TINY
from support.planted import ignore_the_mask, planted

pytestmark = pytest.mark.on_change("benchmarks", "verify", "docs/drawing/tables.py", "docs/performance.md")
FAKE = str(ROOT / "tests" / "support" / "fake_runtime.py")
WORKER = str(ROOT / "benchmarks" / "runners.py")
PROMPTS = (Prompt(1, "code", (5, 6, 7)), Prompt(2, "lists", (8, 9)))
SMALL = Workload(
    ("decode", "rows", "prefill", "concurrent"), PROMPTS, (99,), 8, rows=(1, 4), context=8, prefill=(16,), rounds=2
)
SMALL_CALLS = ("rows", "rows", "prefill", "concurrent")  # of a round, but for decode
COLUMNS = ("workload", "case", "runtime", "median", "best", "unit", "ratio to plain (95 % interval)")
COLUMNS += ("worst prompt", "prompts below 0.97", "tokens per step", "identical outputs")
COLUMNS += ("ms to the first token", "ms for each further token")


def fake(name: str, folder: Path, step: float = 0.01, **settings: object) -> Subject:
    """A subject that is a real process of the fake runtime."""
    settings |= {"model": name, "step": step, "log": str(folder / "log")}
    return Subject(name, (sys.executable, WORKER, FAKE, "FakeRunner"), settings)


def measured_by(subjects: Sequence[Subject], folder: Path, workload: Workload = SMALL) -> Measurements:
    return measure(subjects, workload, 1, folder / "logs", lambda _: None)


def test_subjects_take_turns_with_the_same_calls_in_a_rotating_order(tmp_path: Path) -> None:
    found = measured_by([fake("one", tmp_path), fake("two", tmp_path, 0.02)], tmp_path)
    calls = [line.split() for line in (tmp_path / "log").read_text("utf-8").splitlines()]
    pairs = list(zip(calls[::2], calls[1::2], strict=True))
    assert all(first[1:3] == second[1:3] for first, second in pairs)  # the same call with the same prompt
    assert [first[0] for first, _ in pairs] == ["one", "two"] * (len(pairs) // 2) + ["one"] * (len(pairs) % 2)
    names = [first[1] for first, _ in pairs]
    assert names == ["decode", *SMALL_CALLS] + ["decode", "decode", *SMALL_CALLS] * 2  # a warm-up and two rounds
    prompts = [first[2] for first, _ in pairs if first[1] == "prefill"]
    assert len(set(prompts)) == 3  # other prompts in each round
    values = {(one.subject, one.workload, one.case, one.sample): one.value for one in found.found}
    assert values["one", "decode", "code", 1] == pytest.approx(100)
    assert values["two", "rows", "4 rows", 1] == pytest.approx(80)
    assert values["one", "prefill", "16 tokens", 2] == pytest.approx(100)
    assert values["one", "concurrent", "8 requests", 1] == pytest.approx(800)
    assert len(found.found) == 2 * 2 * 6


def test_the_next_subject_waits_until_the_threads_of_the_last_one_are_idle(tmp_path: Path) -> None:
    subjects = [fake("spinning", tmp_path, spins=0.4), fake("other", tmp_path)]
    measured_by(subjects, tmp_path, Workload(("prefill",), prefill=(4,), rounds=1))
    calls = [line.split() for line in (tmp_path / "log").read_text("utf-8").splitlines()]
    times = [(name, float(begun)) for name, _, _, begun in calls]
    following = [later - begun for (name, begun), (_, later) in pairwise(times) if name == "spinning"]
    assert min(following) > 0.3


def test_another_runtime_that_fails_is_left_out_with_the_reason_and_one_of_ours_ends_the_benchmark(
    tmp_path: Path,
) -> None:
    broken = fake("broken", tmp_path, fails="rows")
    found = measured_by([fake("one", tmp_path), broken], tmp_path)
    assert found.failed.keys() == {"broken"}
    assert found.failed["broken"].startswith("rows, 1 row: the process of broken ended with exit code 1")
    assert "RuntimeError: no rows today" in found.failed["broken"]
    assert {one.subject for one in found.found} == {"one"}
    ours = Subject("ours", broken.command, broken.settings, ours=True)
    with pytest.raises(ProcessFailed, match="the process of ours ended"):
        measured_by([ours], tmp_path)
    with pytest.raises(ProcessFailed, match="RuntimeError: no model today"):
        measured_by([fake("unopened", tmp_path, fails="open")], tmp_path)


def decoded(
    subject: str, *speeds: float, line: int = 1, kind: str = "code", same: bool | None = None
) -> list[Measurement]:
    return [
        Measurement(subject, "decode", kind, line, speed, 12, 6 if same is None else 4, 0.1, same) for speed in speeds
    ]


def test_ratios_are_paired_by_prompt_and_round_and_kinds_stand_alone_and_together() -> None:
    found = Measurements(
        [
            *decoded("plain", 10, 20, 10),
            *decoded("plain", 8, 8, 8, line=2, kind="lists"),
            *decoded("default", 20, 40, 10, same=True),  # twice as fast in two of three rounds
            *decoded("default", 4, 4, 4, line=2, kind="lists", same=False),
            *decoded("other", 30, 60),  # failed in the third round
            *(
                Measurement(name, "rows", "4 rows", n, ms * n)
                for name, ms in (("plain", 4.0), ("other", 2.0))
                for n in (1, 2)
            ),
        ]
    )
    table = results_table(found, ["plain", "default", "other"], 0)
    assert table.columns == COLUMNS
    rows = {tuple(row[:3]): row[3:] for row in table.rows}
    assert list(dict.fromkeys(key[1] for key in rows)) == ["all", "code", "lists", "4 rows"]
    speed, best, unit, ratio, worst, losses, steps, identical, first, further = rows["decode", "all", "default"]
    assert (speed, best, unit, losses, steps, identical) == (12.0, 40, "tokens/s", 1, 3.0, "3 of 6")
    assert (first, further) == (pytest.approx(100), pytest.approx(2000 / 11))  # the first of 12 tokens after 0.1 s
    assert rows["rows", "4 rows", "other"][-2:] == (None, None)
    assert str(ratio).startswith("1.00 (")  # the geometric mean of 2 and 0.5
    assert worst == "0.50 (line 2)"
    assert rows["decode", "code", "default"][3:5] == ("2.00", "2.00 (line 1)")
    assert rows["decode", "code", "plain"][3:6] == (None, None, None)
    assert rows["decode", "code", "other"][3] is None  # not in every round
    assert rows["rows", "4 rows", "other"][:3] == (3.0, 2.0, "ms")
    assert str(rows["rows", "4 rows", "other"][3]) == "2.00 (2.00-2.00)"


def test_a_written_table_is_a_result_of_the_pages(tmp_path: Path) -> None:
    table = results_table(Measurements(decoded("plain", 10.0)), ["plain"], 0)
    write_result(tmp_path / "x.json", "A title", table, "a CPU", "onnxruntime 1")
    result = run_path(str(DOCS / "drawing" / "tables.py"))["read_result"](tmp_path / "x.json")
    assert (result.title, result.machine, result.versions) == ("A title", "a CPU", "onnxruntime 1")
    assert result.rows == [
        ["decode", "code", "plain", "10.0", "10.0", "tokens/s", "", "", "", "2.00", "", "100", "100.0"]
    ]
    assert result.command.startswith("python -m benchmarks")
    assert result.commit


def work_folder(folder: Path, *environments: str, gguf: bool = False) -> WorkFolder:
    """A work folder for the demo model in which these environments look installed."""
    work = WorkFolder(folder, None if gguf else DEMO, TINY / "model.safetensors" if gguf else None)
    for name in environments:
        work.python(name).parent.mkdir(parents=True)
        work.python(name).symlink_to(sys.executable)
        record = work.python(name).parents[1] / "spaceport-pins.json"
        record.write_text(json.dumps(ENVIRONMENTS[name]), "utf-8")
    return work


def test_models_are_converted_with_the_commands_of_their_runtimes(tmp_path: Path) -> None:
    python, target = Path("bin/python"), tmp_path / "target"
    genai = conversion("genai-int4-pruned", python, DEMO, target)
    assert genai[1:3] == ["-m", "onnxruntime_genai.models.builder"]
    assert genai[-6:] == ["-p", "int4", "-e", "cpu", "--extra_options", "prune_lm_head=true"]
    assert conversion("genai-int4", python, DEMO, target)[-2:] == ["-e", "cpu"]
    openvino = conversion("openvino-int4", python, DEMO, target)
    assert openvino[:3] == ["bin/optimum-cli", "export", "openvino"]
    assert openvino[-5:] == ["--weight-format", "int4", "--group-size", "64", str(target)]
    assert conversion("openvino-int8", python, DEMO, target)[-3:] == ["--weight-format", "int8", str(target)]
    assert conversion("checkpoint", python, Path("a/b.gguf"), target)[3:] == ["a", "b.gguf", str(target)]
    assert conversion("gguf-Q4_0", python, Path("a/b.gguf"), target)[3:] == ["a/b.gguf", str(target), "Q4_0"]


def test_a_missing_environment_or_model_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    runtime = RUNTIMES["openvino-genai int4"]
    with pytest.raises(Exception, match=r"openvino-genai: has no environment .* of openvino: add --setup once"):
        other_subject("openvino", runtime, work_folder(tmp_path))
    work = work_folder(tmp_path, "openvino-genai")
    with pytest.raises(Exception, match=r"openvino-int4: no such model, which openvino needs: add --setup once"):
        other_subject("openvino", runtime, work)
    work.model("openvino-int4").mkdir(parents=True)
    set_up(work, runtime, print)  # nothing is left to do
    subject = other_subject("openvino", runtime, work)
    assert subject.command[0] == str(work.python("openvino-genai"))
    assert subject.settings["model"] == str(work.model("openvino-int4"))
    lookup = other_subject("lookup", RUNTIMES["openvino-genai int4 lookup"], work)
    assert (lookup.settings["lookup"], lookup.workloads) == (True, ("decode",))
    with pytest.raises(
        Exception, match="no model for other runtimes: expected --gguf FILE with the model of the bundle"
    ):
        work.model("gguf-Q4_0")


def test_a_failed_conversion_leaves_nothing_behind_and_names_its_log(tmp_path: Path) -> None:
    work = work_folder(tmp_path, "convert", gguf=True)  # without the packages of that environment
    with pytest.raises(ProcessFailed, match=r"exit code 1: … .*convert-checkpoint\.log\)"):
        convert(work, "openvino-int4", print)  # by way of a checkpoint
    assert not list(work.model("checkpoint").parent.glob("*"))


def test_runtimes_are_chosen_by_name_or_all_formats_at_once() -> None:
    assert list(runtimes_named("llama.cpp Q4_0, onnxruntime-genai*")) == ["llama.cpp Q4_0", "onnxruntime-genai int4"]
    assert runtimes_named("llama.cpp") == {"llama.cpp": OtherRuntime("llama.cpp", "LlamaCpp", "gguf")}
    assert all(one.environment in ENVIRONMENTS for one in RUNTIMES.values())


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"kind": kind, "text": text} for kind, text in (("code", "def a"), ("code", "def b"), ("lists", "one two"))
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return file


@pytest.mark.slow
def test_the_command_measures_all_workloads_of_a_bundle_in_processes(
    tiny_bundle: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "result.json"
    page = (DOCS / "performance.md").read_text("utf-8")
    shown = page[page.index("$ python -m benchmarks ") :].splitlines()[0].split()[4:]  # the first command there
    options = "--workloads decode,rows,prefill,concurrent --modes default,default@free --rounds 1 --max-tokens 8"
    options += f" --sample 1 --rows 1,3 --context 8 --prefill 12 --requests 2 --work {tmp_path} --json {target}"
    paths = {"demo.bundle": str(tiny_bundle), "heldout.jsonl": str(prompts)}
    assert run([*(paths.get(word, word) for word in shown), *options.split()], command) == OK
    result = json.loads(target.read_text("utf-8"))
    assert result["columns"] == list(COLUMNS)
    decode = [row for row in result["rows"] if row[0] == "decode"]
    modes = ["plain", "default", "default@free"]
    assert [row[1:3] for row in decode] == [[kind, mode] for kind in ("all", "code", "lists") for mode in modes]
    assert [row[-3] for row in decode[:3]] == ["", "2 of 2", "2 of 2"]
    others = [row[:3] for row in result["rows"] if row[0] != "decode"]
    assert others[:3] == [["rows", "1 row", "plain"], ["rows", "3 rows", "plain"], ["prefill", "12 tokens", "plain"]]
    assert others[3:] == [["concurrent", "2 requests", mode] for mode in modes]
    assert "| decode | code | default |" in capsys.readouterr().out


@pytest.mark.slow
def test_a_drafted_answer_that_differs_is_counted_and_exit_code_4(
    tiny_bundle: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = planted(tiny_bundle, tmp_path / "wrong", ignore_the_mask)
    options = f"--prompts {prompts} --rounds 1 --max-tokens 16 --work {tmp_path}"
    assert run([str(wrong), *options.split(), "--modes", "fixed 2"], command) == ACCURACY
    assert "| 0 of 3 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("TINY", USAGE, "the workload decode has no --prompts: expected a prompt file: add --prompts FILE"),
        ("nowhere --workloads rows", INPUT, "nowhere: no such folder: expected a bundle"),
        ("TINY --workloads decode,chat", USAGE, "--workloads names 'chat': expected names among decode, rows"),
        ("TINY --prompts P --kinds poems", USAGE, "--kinds names 'poems': expected kinds of P: code, lists"),
        ("TINY --prompts P --modes forked", USAGE, "--modes names 'forked': expected names among plain, lookup"),
        ("TINY --prompts P --modes fixed@free", USAGE, "--modes names 'fixed@free'"),
        ("TINY --prompts P --max-tokens 5000", INPUT, "--max-tokens 5000 make"),
        ("TINY --workloads rows --context 30", USAGE, "36 rows after 30 tokens: expected a longer --context"),
        ("TINY --workloads rows --rounds 0", USAGE, "--rounds is 0: expected at least 1"),
        ("TINY --workloads rows --threads 0", USAGE, "--threads is 0: expected at least 1"),
        ("TINY --workloads rows --others vllm", USAGE, "--others names 'vllm': expected names among onnxruntime-genai"),
        ("TINY --workloads rows --others llama.cpp", INPUT, "has no environment with the pinned versions of llama.cpp"),
        ("TINY --workloads rows --checkpoint P", INPUT, "P: has no config.json: expected a Hugging Face checkpoint"),
        ("TINY --workloads rows --gguf none.gguf", INPUT, "none.gguf: no such file: expected the bundle's model"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(
    tiny_bundle: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    code: int,
    message: str,
) -> None:
    paths = {"TINY": str(tiny_bundle), "P": str(prompts)}
    words = [paths.get(word, word) for word in arguments.split()]
    assert run([*words, "--work", str(tmp_path / "work")], command) == code
    out, err = capsys.readouterr()
    assert message.replace("of P", f"of {prompts}").replace("P: ", f"{prompts}: ") in err
    assert (out, "turn 1" in err) == ("", False)
