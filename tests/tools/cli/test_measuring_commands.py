"""Acceptance and audit: equal numbers for a checkpoint and its bundles, tables, faults, prompt files and errors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from spaceport.exporter.export import ExportOptions
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.formats import FORMATS
from spaceport.runtime.decode import step as loop
from spaceport.runtime.decode.sources import USUAL_LOOKUP
from spaceport.tools.cli import ACCURACY, OK, cli, run
from spaceport.verify.audit import requests_for
from spaceport.verify.prompts import AuditPrompt, read_prompts
from support.exported import bundle_of
from support.paths import TINY
from support.small_bundle import RECORD, fill
from support.spoilt_engine import lenient

TEXTS = list(json.loads((TINY / "prompts.json").read_text("utf-8")).values())
HEAVY = ("torch", "transformers", "onnx", "polygraphy", "tensorrt", "tensorrt_rtx")
# argv: arguments. The program without the packages that only exports need.
LIGHT = f"import sys; sys.modules.update(dict.fromkeys({HEAVY})); from spaceport.tools.cli import main; main()"
Capture = pytest.CaptureFixture[str]


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


LINES = (
    {**chat("How does json/scanner.py begin?", '"""JSON token scanner\n"""\nimport re\ntry:\n'), "kind": "code"},
    {"text": "import re\n\nFLAGS = re.VERBOSE | re.MULTILINE | re.DOTALL\n\nNaN = float('nan')\n" * 3},
    chat("What is JSON?", "A format."),
)


def test_inspect_says_how_exact_drafts_are_once_a_bundle_was_opened(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(["inspect", str(tiny_bundle)]) == OK
    assert re.search("^drafted text here +not measured yet", capfd.readouterr().out, re.MULTILINE)
    assert run(["generate", str(tiny_bundle), "import re", "--max-tokens", "1"]) == OK
    capfd.readouterr()
    assert run(["inspect", str(tiny_bundle)]) == OK
    shown = "^drafted text here +(bit-identical|equal unless two tokens are equally likely)"
    assert re.search(shown, capfd.readouterr().out, re.MULTILINE)


def test_inspect_says_beforehand_what_would_run_on_the_cpu_instead_of_a_gpu(half_bundle: Path, capfd: Capture) -> None:
    shown = {}
    int4 = bundle_of(TINY, ExportOptions(FORMATS["float16-int4"]))
    for bundle in (half_bundle, int4):
        assert run(["inspect", str(bundle), "--backend", "onnxruntime-cuda", "--json"]) == OK
        shown[bundle] = json.loads(capfd.readouterr().out)["backend"]
    for found in shown.values():
        assert found["here"] == "can run it" or "needs an NVIDIA GPU" in found["here"] or "CUDA" in found["here"]
    assert shown[half_bundle]["on the CPU"] == "computations of shapes only"
    assert shown[int4]["on the CPU"] == "DequantizeLinear, TensorScatter"
    assert shown[int4]["CUDA graphs"] == "off, as DequantizeLinear may run on the CPU"
    assert run(["inspect", str(half_bundle), "--backend", "onnxruntime-cuda"]) == OK
    assert "onnxruntime-cuda, CUDA graphs" in capfd.readouterr().out


def acceptance(folder: Path, *models: Path, options: str = "") -> list[dict[str, Any]]:
    """The numbers of models with LINES."""
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES), "utf-8")
    words = ["acceptance", *map(str, models), str(file), "--max-tokens", "40", *options.split(), "--json"]
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    found: list[dict[str, Any]] = json.loads(result.stdout)["models"]
    return found


def test_a_checkpoint_and_its_bundles_have_the_same_acceptance(
    tmp_path: Path, tiny_bundle: Path, tiny_append_bundle: Path
) -> None:
    (checkpoint,) = acceptance(tmp_path, TINY)
    models = [tiny_bundle, tiny_append_bundle]
    rows = acceptance(tmp_path, *models, options="--threads 1")
    assert rows == [{**checkpoint, "model": str(model)} for model in models]
    assert (checkpoint["answers"], checkpoint["draft_tokens"]) == (3, 5)
    assert checkpoint["tokens_per_step"] > 1.5
    assert checkpoint["kinds"].keys() == {"code"}
    for counts in (checkpoint, checkpoint["kinds"]["code"]):
        shares = [good / count for good, count in zip(counts["accepted"], counts["drafted"], strict=True)]
        assert counts["acceptance"] == shares


@pytest.mark.torch
def test_saved_rates_are_those_of_the_measurement(tmp_path: Path) -> None:
    before = json.loads((TINY / "sar_config.json").read_text("utf-8"))
    checkpoint = shutil.copytree(TINY, tmp_path / "copy")
    (found,) = acceptance(tmp_path, checkpoint, options="--save")
    entries = json.loads((checkpoint / "sar_config.json").read_text("utf-8"))
    (measured,) = entries.pop("acceptance")
    assert entries == before
    assert measured["rates"] == [round(rate, 4) for rate in accumulate(found["acceptance"], min)]
    assert (measured["tokens"], measured["data"], measured["temperature"]) == (found["tokens"], "data.jsonl", 0.0)
    assert measured["lookup"] != [round(rate, 4) for rate in USUAL_LOOKUP]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[::2]), "utf-8")
    return file


def arguments(bundle: Path, prompts: Path, *more: object) -> list[str]:
    words = ("audit", bundle, prompts, "--threads", 1, "--max-seq-len", 128, "--max-tokens", 16, *more)
    return [str(one) for one in words]


def test_it_runs_without_the_packages_of_exports(tiny_bundle: Path, prompts: Path) -> None:
    command = [sys.executable, "-c", LIGHT, *arguments(tiny_bundle, prompts, "--max-requests", 2)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == OK, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("lossless: 20 completions, 320 tokens, 0 faults, 0 near-ties (noise ")


def test_a_fault_is_shown_with_its_position_and_has_its_own_exit_code(
    tiny_bundle: Path, prompts: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "accept", lenient())
    assert run(arguments(tiny_bundle, prompts, "--max-requests", 1)) == ACCURACY
    out, _ = capfd.readouterr()
    fault = r"FAULT: prompt 2 \(line 2\), chain k = 5, token \d+: expected '.*', found '.*' \(margin \d\.\de"
    assert re.search(fault + r"[+-]\d\d\)\n  after '.*nobody", out)
    assert re.search(r"\n\d+ more mismatches: --json lists them\n", out)
    assert out.splitlines()[-1].startswith("NOT LOSSLESS: 8 completions, 128 tokens, ")
    assert run(arguments(tiny_bundle, prompts, "--max-requests", 1, "--limit", 1, "--json")) == ACCURACY
    report = json.loads(capfd.readouterr().out)
    assert report["passed"] is False
    assert report["summary"].startswith("NOT LOSSLESS: 4 completions, 64 tokens, ")
    widths = [width["rows"] for width in report["noise_by_width"]]
    assert widths == [1, 2, 4, 9, 16, 36, 64][: len(widths)]
    assert {mode["completions"] for mode in report["modes"]} == {1}
    faults = [one for one in report["mismatches"] if one["grade"] == "FAULT"]
    assert sum(mode["faults"] for mode in report["modes"]) == len(faults) > 0
    assert faults[0]["expected"]["id"] != faults[0]["found"]["id"]
    assert faults[0]["margin"] > 2 * report["noise"]


def test_several_bundles_have_one_table_and_a_fault_of_one_is_the_exit_code(
    tiny_bundle: Path, tiny_append_bundle: Path, prompts: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*arguments(tiny_bundle, prompts, "--max-requests", 1, "--limit", 1)]
    words.insert(2, str(tiny_append_bundle))
    assert run([*words, "--json"]) == OK
    found = json.loads(capfd.readouterr().out)
    assert found["passed"]
    assert [one["model"] for one in found["models"]] == [str(tiny_bundle), str(tiny_append_bundle)]
    monkeypatch.setattr(loop, "accept", lenient())
    assert run(words) == ACCURACY
    out = capfd.readouterr().out
    assert f"{tiny_bundle}: NOT LOSSLESS: 4 completions" in out
    assert out.count("FAULT: prompt 1 (line 1)") >= 2


def test_concurrent_requests_are_limited_to_those_of_the_engines(tmp_path: Path) -> None:
    """Otherwise the bundle would be opened on a backend without that limit, and that backend would be audited."""
    manifest = fill(tmp_path)
    for engines, asked, expected in (((), 4, 4), ((2, 1), 4, 2), ((8,), 4, 4), ((2, 1), 16, 2)):
        records = {str(index): replace(RECORD, requests=requests) for index, requests in enumerate(engines)}
        assert requests_for(replace(manifest, engines=records), asked) == expected


def test_prompts_are_lines_of_text_or_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(b"\xef\xbb\xbfimport os\r\n\n  def f():\n")
    assert read_prompts(file) == [AuditPrompt(1, "import os"), AuditPrompt(3, "  def f():")]
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    lines: list[tuple[dict[str, object], AuditPrompt]] = [
        ({"messages": [user, answer]}, AuditPrompt(1, (user,))),
        ({"messages": [user, answer, user, answer]}, AuditPrompt(2, (user, answer, user))),
        ({"kind": "chat", "messages": [user]}, AuditPrompt(3, (user,), kind="chat")),
        ({"prompt": "c", "response": "d"}, AuditPrompt(4, ({"role": "user", "content": "c"},), "c")),
        ({"text": "{"}, AuditPrompt(5, "{")),
    ]
    file.write_text("\n".join(json.dumps(one) for one, _ in lines), "utf-8")
    assert read_prompts(file) == [expected for _, expected in lines]
    file.write_text(json.dumps([one for one, _ in lines[2:]] + ["[INST] d"], indent=1), "utf-8")
    numbers = (2, 11, 15, 18)  # of the lines on which the entries begin
    listed = [*(expected for _, expected in lines[2:]), AuditPrompt(0, "[INST] d")]
    assert read_prompts(file) == [replace(one, line=line) for line, one in zip(numbers, listed, strict=True)]
    texts = ("[INST] d", "[1] e", "# a comment", "def f():", "#include <a>", "<b> f")
    file.write_text("\n".join(texts) + "\n\n", "utf-8")
    assert [prompt.prompt for prompt in read_prompts(file)] == list(texts)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no prompt: expected at least one line"),
        (b"[]", "has no prompt: expected at least one"),
        (b"a\n\xff\n", "line 2: not UTF-8 text"),
        (b'{"text": "a"}\n{"text"\n', r"line 2: not JSON .*expected an object on each line"),
        (b'{"text": "a"}\n3\n', 'line 2: has none of them: expected one of "messages", "prompt" and "text"'),
        (b'{"a": "b", "c": "d"}', "line 1: has none of them"),
        (b'\n[\n"a",\n3]', "line 4: has none of them"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}\n', "line 1: the first turn is the assistant"),
        (b'["a", {"text": "b"}', "not a JSON list .*: expected a list of prompts"),
        (b"A model\n\n```\nspaceport demo\n```\n", "line 3: '```' is part of a document, not a prompt: expected one"),
        (b"# Spaceport\r\n\r\nText.\r\n", "line 1: '# Spaceport' is part of a document"),
        (b"\n<!DOCTYPE html>\n<p>", "line 2: '<!DOCTYPE html>' is part of a document"),
        (b"a\nb\x00c", r"line 2: 'b\\x00c' is part of a document"),
    ],
)
def test_an_invalid_prompt_file_is_an_error_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    with pytest.raises(InputFault, match=f"^{re.escape(str(file))}.*{message}"):
        read_prompts(file)
