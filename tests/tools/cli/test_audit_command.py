"""The audit command: its output, exit codes, prompt files and errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spaceport.graphs.contract.faults import InputFault
from spaceport.runtime.decode import step as loop
from spaceport.runtime.decode.accept import Verdict, accept
from spaceport.runtime.decode.plan import Part
from spaceport.runtime.decode.selector import TokenSelector
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import ACCURACY, INPUT, OK, USAGE
from spaceport.tools.verify.audit.bundle_audit import requests_for
from spaceport.tools.verify.audit.prompts import AuditPrompt, read_prompts
from support.paths import DOCS, TINY
from support.small_bundle import RECORD, fill

TEXTS = list(json.loads((TINY / "prompts.json").read_text("utf-8")).values())
HEAVY = ("torch", "transformers", "onnx", "polygraphy", "tensorrt", "tensorrt_rtx")
# argv: arguments. The program without the packages that only exports need.
LIGHT = f"import sys; sys.modules.update(dict.fromkeys({HEAVY})); from spaceport.tools.cli import main; main()"

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[::2]), "utf-8")
    return file


def arguments(bundle: Path, prompts: Path, *more: object) -> list[str]:
    words = ("audit", bundle, prompts, "--threads", 1, "--max-seq-len", 128, "--max-tokens", 16, *more)
    return [str(one) for one in words]


def first_candidate(part: Part, logits: np.ndarray, choose: TokenSelector, *limits: int) -> Verdict:
    """Accept the first draft token, whatever it is."""
    verdict = accept(part, logits, choose, *limits)
    if not part.draft.tokens or verdict.accepted:
        return verdict
    row = part.layout.nodes[1]
    following = choose.token(logits[row - int(part.rows_wanted[0])], part.thread, ())
    return Verdict((*verdict.retained, row), (part.draft.tokens[0], following), ())


def test_it_runs_without_the_packages_of_exports(tiny_bundle: Path, prompts: Path) -> None:
    command = [sys.executable, "-c", LIGHT, *arguments(tiny_bundle, prompts, "--max-requests", 2)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == OK, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "Noise of other step widths and KV slots, against steps of one row (OnnxRuntimeEngine, cpu, float32, scatter)"
    )
    assert any(re.match(r"2 x 9 rows +\d+  \d\.\de[+-]\d\d  \d\.\de-0[34]  rounding$", line) for line in lines)
    assert any(re.match(r"tree with lookup, sampled +2 +2 +32 +\d+  2 +0 +0$", line) for line in lines)
    assert re.fullmatch(r"lossless: 20 completions, 320 tokens, 0 faults, 0 near-ties \(noise .*\)", lines[-1])


def test_a_fault_is_shown_with_its_position_and_has_its_own_exit_code(
    tiny_bundle: Path, prompts: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "accept", first_candidate)
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
    monkeypatch.setattr(loop, "accept", first_candidate)
    assert run(words) == ACCURACY
    lines = capfd.readouterr().out.splitlines()
    tokens = sum(mode["tokens"] for mode in found["models"][0]["modes"] if not mode["reference"])
    row = re.compile(rf"(\S+) +unknown  5 mask slots +4 +{tokens} +\d+ +\d\.\d\d +0 +\d+  NOT LOSSLESS")
    assert [row.match(line)[1] for line in lines[2:4]] == [str(tiny_bundle), str(tiny_append_bundle)]  # type: ignore[index]
    assert f"{tiny_bundle}: NOT LOSSLESS: 4 completions" in "\n".join(lines)
    assert sum(line.startswith("FAULT: prompt 1 (line 1)") for line in lines) >= len(found["models"])


def test_concurrent_requests_are_limited_to_those_of_the_engines(tmp_path: Path) -> None:
    """Otherwise the bundle would be opened on a backend without that limit, and that backend would be audited."""
    manifest = fill(tmp_path)
    assert [record.requests for record in manifest.engines.values()] == [4]
    assert requests_for(replace(manifest, engines={})) == 4
    few = {name: replace(RECORD, requests=requests) for name, requests in (("a", 2), ("b", 1))}
    assert requests_for(replace(manifest, engines=few)) == 2
    assert requests_for(replace(manifest, engines={"a": replace(RECORD, requests=8)})) == 4


def test_prompts_are_lines_of_text_or_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(b"\xef\xbb\xbfimport os\r\n\n  def f():\n")
    assert read_prompts(file) == [AuditPrompt(1, "import os"), AuditPrompt(3, "  def f():")]
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    lines = [
        {"messages": [user]},
        {"messages": [user, answer]},
        {"messages": [user, answer, user, answer]},
        {"kind": "chat", "messages": [user, answer, user]},
        {"prompt": "c", "response": "d"},
        {"text": "{"},
    ]
    file.write_text("\n".join(json.dumps(one) for one in lines), "utf-8")
    assert read_prompts(file) == [
        AuditPrompt(1, (user,)),
        AuditPrompt(2, (user,)),
        AuditPrompt(3, (user, answer, user)),
        AuditPrompt(4, (user, answer, user), kind="chat"),
        AuditPrompt(5, ({"role": "user", "content": "c"},), "c"),
        AuditPrompt(6, "{"),
    ]


def test_an_invalid_prompt_file_is_an_error_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    for content, message in (
        (b"", "has no prompt: expected at least one line"),
        (b"a\n\xff\n", "line 2: not UTF-8 text"),
        (b'{"text": "a"}\n{"text"\n', r"line 2: not JSON .*expected an object on each line"),
        (b'{"text": "a"}\nplain\n', r'line 2: not JSON .*write plain text as {"text"'),
        (b'{"text": "a"}\n3\n', 'line 2: has none of them: expected one of "messages", "prompt" and "text"'),
        (b'{"text": "a", "prompt": "b"}\n', 'line 1: has "prompt" and "text": expected one of'),
        (b'{"prompt": " "}\n', "line 1: \"prompt\" is ' ': expected text"),
        (b'{"text": "a", "kind": 7}\n', 'line 1: "kind" is 7: expected text, such as "code"'),
        (b'{"messages": ["a"]}\n', r"line 1: \"messages\" is \['a'\]: expected a list of turns"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}\n', "line 1: the first turn is the assistant"),
    ):
        file.write_bytes(content)
        with pytest.raises(InputFault, match=message) as caught:
            read_prompts(file)
        assert str(caught.value).startswith(str(file))


def test_mistakes_are_one_line_before_an_audit(
    tiny_bundle: Path, prompts: Path, tmp_path: Path, capfd: Capture
) -> None:
    none, no_bundle, no_prompts = tmp_path / "none", "none: no such folder: expected a bundle", "expected a prompt file"
    for words, code, message in (
        (arguments(tiny_bundle, prompts, "--max-tokens", 0), USAGE, "--max-tokens is 0: expected at least 1"),
        (arguments(tiny_bundle, prompts, "--limit", 0), USAGE, "--limit is 0: expected at least 1"),
        (arguments(tiny_bundle, prompts, "--max-requests", 0), USAGE, "--max-requests is 0: expected 1 to 1024"),
        (arguments(tiny_bundle, prompts, "--max-seq-len", 60), INPUT, r"line 1: 4\d prompt tokens and .* is 60:"),
        (arguments(none, prompts), INPUT, no_bundle),
        (["audit", str(tiny_bundle), str(none), str(prompts)], INPUT, no_bundle),
        (arguments(tiny_bundle, tmp_path), INPUT, no_prompts),
        (arguments(tiny_bundle, none), INPUT, no_prompts),
    ):
        assert run(words) == code
        out, err = capfd.readouterr()
        assert out == ""
        assert re.search(message, err)
        assert "auditing" not in err


def test_the_programs_of_the_page_run(
    tiny_bundle: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo.bundle").symlink_to(tiny_bundle)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Explain the parameters of f(a, b)"}), "utf-8")
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "audit.md").read_text("utf-8")
    reproduce, program = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    record = {"prompt": [5, 6, 7], "options": {"temperature": 0.5}, "seed": 3}
    (tmp_path / "audit.jsonl").write_text(json.dumps(record) + "\n", "utf-8")
    exec(compile(reproduce, "docs", "exec"), {})
    assert capfd.readouterr().out == "True\n"
    exec(compile(program, "docs", "exec"), {})
    assert re.fullmatch(r"lossless: 10 completions, 160 tokens, 0 faults, .*\n", capfd.readouterr().out)
