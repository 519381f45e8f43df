"""Mistakes: a user's mistake is one line on stderr with the exit code of its kind, never a traceback."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spaceport.graphs.contract.manifest import (
    ACCURACY_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    SCHEMA,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
)
from spaceport.runtime import EngineFault
from spaceport.runtime.bundle import read_manifest
from spaceport.tools.cli import Commands, cli, run
from spaceport.tools.cli.exit_codes import FAULT, INPUT, INTERRUPTED, MISSING, OK, USAGE
from support.paths import TINY
from support.small_bundle import edit

LONG = json.loads((TINY / "prompts.json").read_text("utf-8"))[
    "begin of json/decoder.py"
]  # its output goes on for 1,000 tokens

PROGRAM = "from spaceport.tools.cli import main; main()"
# argv: a package, arguments. The program where that package is not installed.
WITHOUT = f"import sys; sys.modules[sys.argv.pop(1)] = None; {PROGRAM}"

Capture = pytest.CaptureFixture[str]


def fails(capfd: Capture, code: int, message: str, *arguments: object) -> None:
    """Assert the exit code, this message on stderr and an empty stdout."""
    assert run([str(argument) for argument in arguments]) == code
    output, errors = capfd.readouterr()
    assert output == ""
    assert re.search(message, errors)
    assert "Traceback" not in errors


def spaceport(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run the program in a new process."""
    command = [sys.executable, "-c", code, *(a if isinstance(a, bytes) else str(a) for a in arguments)]
    return subprocess.run(command, capture_output=True, check=False, **options)


@pytest.fixture
def damaged(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A bundle that a test may change."""
    return shutil.copytree(tiny_bundle, tmp_path / "bundle")


def put(bundle: Path, name: str, content: bytes) -> None:
    """Replace a file of a bundle and its hash in the manifest."""
    (bundle / name).write_bytes(content)
    record = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    edit(bundle, lambda manifest: manifest["files"].update({name: record}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt: expected either PROMPT .- reads standard input. or --prompt-file FILE"),
        (["a", "--prompt-file", __file__], "PROMPT and --prompt-file are both given: expected either"),
        (["a", "b"], r"unexpected extra argument \(b\)"),
        ([""], "the prompt is empty: expected at least one character"),
        (
            ["x" * 3000],
            r"prompt has \d+ tokens, --max-seq-len is 1024, the model.s limit: shorten the prompt$",
        ),
        (
            ["a", "--max-seq-len", 2],
            r"prompt has 2 tokens, --max-seq-len is 2: shorten the prompt, or raise --max-seq-len \(the model.s limit is 1024\)",
        ),
        (["a", "--max-tokens", 0], "--max-tokens is 0: expected at least 1"),
        (
            ["a", "--max-tokens", 5000],
            "2 prompt tokens and --max-tokens 5000 make 5002, --max-seq-len is 1024, the model.s limit: lower --max-tokens to 1022",
        ),
        (["a", "--max-tokens", "many"], "'many' is not a valid integer"),
        (["a", "--max-seq-len", 1], "--max-seq-len is 1: expected 2 to 1024, the model.s limit"),
        (["a", "--max-seq-len", 1025], "--max-seq-len is 1025: expected 2 to 1024"),
        (
            ["a", "--mask-slots", 6],
            "--mask-slots is 6: expected 0 to 5, the number that the bundle was exported with",
        ),
        (["a", "--mask-slots", -1], "--mask-slots is -1: expected"),
        (["a", "--stop", ""], "expected strings of at least one character"),
        (["a", "--threads", -1], r"--threads is -1: expected 0 \(one for each core\) to \d+"),
        (["a", "--threads", 100_000], r"--threads is 100000: expected 0 \(one for each core\) to \d+"),
        (["a", "--backend", "torch"], "--backend torch runs the PyTorch checkpoint: name its folder with --checkpoint"),
        (["a", "--backend", "torch", "--checkpoint", TINY, "--threads", -1], "--threads is -1: expected 0"),
        (
            ["a", "--checkpoint", TINY],
            "--checkpoint has no effect without --backend torch: add --backend torch, or leave it out",
        ),
        (["a", "--backend", "cuda"], "'cuda' is not one of 'auto', 'tensorrt', .*'onnxruntime', 'torch'"),
        (["a", "--mask-slotz", 3], r"No such option.*--mask-slotz"),
        (["a", "--json", "--max-tokens", 0], "--max-tokens is 0: expected at least 1"),
    ],
)
def test_an_invalid_option_is_a_usage_error(
    tiny_bundle: Path, capfd: Capture, arguments: list[object], message: str
) -> None:
    fails(capfd, USAGE, message, "generate", tiny_bundle, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["--frobnicate"], "No such option.*--frobnicate"),
        (["generate"], "Missing argument 'BUNDLE'"),
        (["inspect", "{bundle}", "--requests", 0], "--requests is 0: expected at least 1"),
        (["inspect", "{bundle}", "--max-seq-len", 0], "--max-seq-len is 0: expected 2 to 1024"),
        (["check", "{bundle}", TINY, "--long-context", 3], "--long-context is 3: expected at least 32"),
        (
            ["check", "{bundle}", TINY, "--long-context", 1025],
            "--long-context is 1025: expected at most 1024, the maximum of the model",
        ),
        (
            ["check", "{bundle}", TINY, "--print-polygraphy", "--json"],
            "--json has no effect with --print-polygraphy",
        ),
        (
            ["check", "{bundle}", TINY, "--print-polygraphy", "--threads", 1],
            "--threads has no effect with --print-polygraphy",
        ),
        (
            ["check", "{bundle}", TINY, "--save-outputs", "o", "--layers"],
            "--layers has no effect with --save-outputs",
        ),
        (["check", "{bundle}", TINY, "--seed", -3], "-3 is not in the range"),
        (["check", "{bundle}", TINY, "--threads", -1], "--threads is -1: expected 0"),
        (["bench", "steps", "{bundle}", "--rows", "a"], "--rows is 'a': expected comma-separated numbers"),
        (["bench", "steps", "{bundle}", "--threads", -1], "--threads is -1: expected 0"),
    ],
)
def test_every_command_reports_invalid_options(
    tiny_bundle: Path, capfd: Capture, arguments: list[object], message: str
) -> None:
    fails(capfd, USAGE, message, *(tiny_bundle if part == "{bundle}" else part for part in arguments))


def test_without_a_command_the_commands_are_listed(capfd: Capture) -> None:
    assert run([]) == USAGE
    output, errors = capfd.readouterr()
    assert output == ""
    assert all(name in errors for name in Commands.summaries)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], INPUT, "nowhere: no such folder: expected a checkpoint"),
        ([TINY, "--threads", -2], USAGE, "--threads is -2: expected 0"),
        ([TINY, "--max-tokens", 0], USAGE, "--max-tokens is 0: expected at least 1"),
    ],
)
def test_the_demo_reports_mistakes_before_the_export(
    capfd: Capture, arguments: list[object], code: int, message: str
) -> None:
    fails(capfd, code, f"^spaceport: {message}", "demo", *arguments)


def without_masks(bundle: Path) -> None:
    edit(bundle, lambda manifest: manifest.update(max_mask_slots=0, tokens={**manifest["tokens"], "mask": []}))


def test_mask_slots_without_a_mask_token_are_a_usage_error(damaged: Path, capfd: Capture) -> None:
    without_masks(damaged)
    message = r"--mask-slots is 1: expected 0, since the bundle has no mask token"
    fails(capfd, USAGE, message, "generate", damaged, "a", "--mask-slots", 1)
    assert run(["generate", str(damaged), "a", "--mask-slots", "0", "--max-tokens", "3"]) == OK


def test_a_kv_cache_that_does_not_fit_is_a_usage_error(damaged: Path, capfd: Capture) -> None:
    edit(damaged, lambda manifest: manifest.update(max_positions=2**31 - 1))
    message = r"\d+\.\d GB of KV buffers for \d+ slots do not fit into memory: lower --max-seq-len"
    fails(capfd, USAGE, message, "generate", damaged, "a", "--max-seq-len", 2**31 - 1)


def test_a_chat_without_a_chat_template_is_a_usage_error(damaged: Path, capfd: Capture) -> None:
    edit(damaged, lambda manifest: manifest["files"].pop(TEMPLATE_FILE))
    fails(
        capfd,
        USAGE,
        "--chat: .* has no chat template: leave --chat out and give a plain prompt",
        "generate",
        damaged,
        "a",
        "--chat",
    )


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "no such folder: expected a bundle, the folder that `spaceport export` wrote"),
    "no manifest": (lambda b: (b / MANIFEST_FILE).unlink(), r"no manifest\.json in it: expected a bundle"),
    "no JSON": (lambda b: (b / MANIFEST_FILE).write_text("{"), r"manifest\.json: .*copy the bundle again or export"),
    "newer": (
        lambda b: edit(b, lambda m: m.update(schema=SCHEMA + 1)),
        f"schema is {SCHEMA + 1}, this version reads up to {SCHEMA}: update",
    ),
    "other weights": (lambda b: (b / "model.onnx.data").write_bytes(b""), "0 bytes, the manifest says .*: copy the"),
    "linked weights": (lambda b: (b.parent / "x").hardlink_to(b / MODEL_FILE), r"2 hard links.*copy the bundle \(cp"),
}
# Found only when text is generated.
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (lambda b: put(b, TOKENIZER_FILE, b"{}"), "tokenizer.json: not a readable tokenizer"),
    "no graph": (lambda b: put(b, MODEL_FILE, b"junk"), r"does not load .*model\.onnx: .*export it again"),
    "no data": (lambda b: put(b, "model.onnx.data", b"junk"), r"does not load .*model\.onnx: .*export it again"),
    **{
        f"other {name}": (
            lambda b, name=name, value=value: edit(b, lambda m: m["signature"].update({name: value})),  # type: ignore[misc]
            f"model.onnx: has the .*{got}.*, the manifest says .*{expected}.*: export it again",
        )
        for name, value, got, expected in (
            ("layers", 2, r"past_key_values\.2\.key", "nothing more"),
            ("layers", 4, "nothing more", r"past_key_values\.3\.key"),
            ("kv_heads", 3, r"\[\?, 2, \?, 16\]", r"\[\?, 3, \?, 16\]"),
            ("head_dim", 8, r"\[\?, 2, \?, 16\]", r"\[\?, 2, \?, 8\]"),
            ("vocab_size", 641, r"logits tensor\(float\) \[\?, \?, 640\]", "641"),
            ("dtype", "float16", r"tensor\(float\)", r"tensor\(float16\)"),
            ("window", 8, "logit_rows", "sliding_attention_mask"),
        )
    },
}


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("command", ["inspect", "generate", "check", "bench steps"])
def test_a_damaged_bundle_is_an_input_error_in_every_command(
    damaged: Path, capfd: Capture, command: str, kind: str
) -> None:
    damage, message = DAMAGES[kind]
    damage(damaged)
    more: dict[str, list[object]] = {"generate": ["a"], "check": [TINY]}
    message = f"^spaceport: {re.escape(str(damaged))}.*{message}"
    fails(capfd, INPUT, message, *command.split(), damaged, *more.get(command, []))


@pytest.mark.parametrize("kind", BROKEN)
def test_files_that_do_not_fit_together_are_an_error_before_any_output(
    damaged: Path, capfd: Capture, kind: str
) -> None:
    damage, message = BROKEN[kind]
    damage(damaged)
    fails(capfd, INPUT, f"(?s){message}", "generate", damaged, "a")


def test_a_checkpoint_instead_of_a_bundle_is_recognized(capfd: Capture) -> None:
    fails(capfd, INPUT, r"\(this is a checkpoint: export it first\)", "generate", TINY, "a")
    fails(capfd, INPUT, r"\(this is a checkpoint: export it first\)", "inspect", TINY)


def test_a_check_report_of_another_graph_is_ignored(damaged: Path, capfd: Capture) -> None:
    def shown() -> str:
        assert run(["inspect", str(damaged)]) == OK
        return capfd.readouterr().out.splitlines()[-1]

    assert shown() == "Accuracy: not checked yet (spaceport check)"
    graph = list(read_manifest(damaged).graph)
    assert len(graph) == 2
    (damaged / ACCURACY_FILE).write_text(json.dumps({"passed": True, "graph": graph}))
    assert shown() == "Accuracy: passed"
    (damaged / ACCURACY_FILE).write_text(json.dumps({"passed": "no", "graph": graph}))
    assert shown() == "Accuracy: FAILED"
    for other in (["0" * 64, graph[1]], [graph[0], "0" * 64]):  # the graph or its weights
        (damaged / ACCURACY_FILE).write_text(json.dumps({"passed": True, "graph": other}))
        assert shown() == "Accuracy: not checked yet (spaceport check)"
    (damaged / ACCURACY_FILE).write_bytes(b"[" * 100_000)
    assert shown() == "Accuracy: FAILED"


def test_a_prompt_that_cannot_be_read_is_an_input_error(
    tiny_bundle: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    fails(
        capfd, INPUT, f"{file}: No such file or directory: expected a", "generate", tiny_bundle, "--prompt-file", file
    )
    fails(capfd, INPUT, "Is a directory: expected a text file", "generate", tiny_bundle, "--prompt-file", tmp_path)
    wrong = r"byte 2 \(0xff\) is not valid UTF-8: expected UTF-8 text"
    file.write_bytes(b"ab\xffc")
    fails(capfd, INPUT, f"{file}: {wrong}", "generate", tiny_bundle, "--prompt-file", file)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xffc")))
    fails(capfd, INPUT, f"standard input: {wrong}", "generate", tiny_bundle, "-")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    fails(capfd, USAGE, "the prompt is empty", "generate", tiny_bundle, "-")
    done = spaceport(PROGRAM, "generate", tiny_bundle, b"ab\xffc")
    assert (done.returncode, done.stdout) == (INPUT, b"")
    assert re.fullmatch(f"spaceport: the prompt: {wrong}\n", done.stderr.decode())


@pytest.mark.parametrize(
    ("package", "arguments", "message"),
    [
        (
            "onnxruntime",
            ["generate", "{bundle}", "a"],
            r"backend onnxruntime needs the package onnxruntime, .*pip install .*\[cpu\]'",
        ),
        (
            "torch",
            ["generate", "{bundle}", "a", "--backend", "torch", "--checkpoint", TINY],
            r"package torch, .*pip install .*\[export\]'",
        ),
        (
            "torch",
            ["export", TINY, "nowhere"],
            r"`spaceport export` needs the package torch, .*pip install .*\[export\]'",
        ),
        ("tokenizers", ["generate", "{bundle}", "a"], "needs the package tokenizers, .*pip install .*"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tiny_bundle: Path, package: str, arguments: list[object], message: str
) -> None:
    done = spaceport(WITHOUT, package, *(tiny_bundle if part == "{bundle}" else part for part in arguments))
    assert (done.returncode, done.stdout) == (MISSING, b"")
    assert re.fullmatch(f"spaceport: .*{message}\n", done.stderr.decode())


@pytest.mark.parametrize(
    "arguments", [["generate", "{bundle}", LONG, "--max-tokens", 9], ["inspect", "{bundle}"], ["doctor"]]
)
def test_with_json_there_is_json_on_stdout_and_nothing_else(
    tiny_bundle: Path, capfd: Capture, arguments: list[object]
) -> None:
    assert run([*(str(tiny_bundle if part == "{bundle}" else part) for part in arguments), "--json"]) == OK
    output, errors = capfd.readouterr()
    assert isinstance(json.loads(output), dict)
    assert errors == ""


@pytest.mark.parametrize("arguments", [["generate", "{bundle}", LONG], ["inspect", "{bundle}", "--json"]])
def test_a_closed_pipe_is_no_error_message(tiny_bundle: Path, arguments: list[object]) -> None:
    named = [str(tiny_bundle if part == "{bundle}" else part) for part in arguments]
    command = [sys.executable, "-c", PROGRAM, *named]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (OK, FAULT)  # what was written before the reader left may have been all


@pytest.mark.parametrize(("closed", "code"), [("<&-", USAGE), (">&-", OK)])
def test_a_closed_stream_is_an_empty_one(tiny_bundle: Path, closed: str, code: int) -> None:
    prompt = "-" if closed == "<&-" else "a"
    command = f'"{sys.executable}" -c "{PROGRAM}" generate "{tiny_bundle}" {prompt} --max-tokens 3 {closed}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr


def test_an_interrupt_ends_a_text_without_a_fuss(tiny_bundle: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "generate", str(tiny_bundle), LONG, "--mask-slots", "0"]
    for _ in range(40):  # a text may be written before the signal comes
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
        if process.returncode != OK:
            break
    else:
        pytest.fail("no signal came in time")
    assert process.returncode == INTERRUPTED
    assert errors.decode().split() == ["spaceport:", "interrupted"]


@pytest.mark.parametrize(
    ("error", "known"), [(EngineFault("the engine failed in step 3"), True), (ZeroDivisionError("division"), False)]
)
def test_only_unexpected_errors_are_called_a_bug(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch, error: Exception, known: bool
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise error

    monkeypatch.setattr(cli, "main", fail)
    assert run(["generate"]) == FAULT
    errors = capfd.readouterr().err
    assert ("this is a bug in spaceport" in errors) != known
    assert (errors == f"spaceport: {error}\n") == known
