"""Mistakes: a user's mistake is one line on stderr with the exit code of its kind, never a traceback."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from spaceport.graphs.contract.manifest import ACCURACY_FILE, MANIFEST_FILE, MODEL_FILE, TOKENIZER_FILE
from spaceport.runtime import EngineFault
from spaceport.runtime.bundle import read_manifest
from spaceport.tools.cli import FAULT, INPUT, INTERRUPTED, MISSING, OK, USAGE, cli, main, run
from support.paths import ROOT, TINY
from support.small_bundle import edit

# its output goes on for 1,000 tokens
LONG = json.loads((TINY / "prompts.json").read_text("utf-8"))["begin of json/decoder.py"]
PROGRAM = "from spaceport.tools.cli import main; main()"
# argv: a JSON list of packages with commands. Runs each command as if its package were not installed.
WITHOUT = """
import json, sys
from spaceport.tools.cli import run
for package, command in json.loads(sys.argv[1]):
    sys.modules[package] = None
    print(run(command), file=sys.stderr)
    del sys.modules[package]
"""

Capture = pytest.CaptureFixture[str]


# argv: commands in JSON. Runs each one, and prints which large packages were imported.
IMPORTS = """
import json, sys
from spaceport.tools.cli import run
for command in json.loads(sys.argv[1]):
    run(command)
print(*(name for name in ("torch", "transformers", "accelerate", "onnxscript", "polygraphy") if name in sys.modules))
"""


def fails(capfd: Capture, code: int, message: str, *arguments: object) -> str:
    """Assert the exit code, this message on stderr and an empty stdout; what is on stderr."""
    assert run([str(argument) for argument in arguments]) == code
    output, errors = capfd.readouterr()
    assert output == ""
    assert re.search(message, errors), errors
    assert "Traceback" not in errors
    return errors


@pytest.fixture
def damaged(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A bundle that a test may change."""
    return shutil.copytree(tiny_bundle, tmp_path / "bundle")


def put(bundle: Path, name: str, content: bytes) -> None:
    """Replace a file of a bundle and its hash in the manifest."""
    (bundle / name).write_bytes(content)
    record = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    edit(bundle, lambda manifest: manifest["files"].update({name: record}))


# Words in capitals are paths of the fixture `named`.
REFUSED = (
    ("frobnicate", USAGE, "there is no command frobnicate: `spaceport --help` lists the commands"),
    ("genrate", USAGE, "there is no command genrate: did you mean generate?"),
    ("help genrate", USAGE, "did you mean generate?"),
    ("bench decod", USAGE, "there is no command decod: did you mean decode?"),
    ("export nowhere NEW", INPUT, "nowhere: no such folder: expected a checkpoint"),
    ("export owner/model NEW", INPUT, r"\(config.json, \*.safetensors, tokenizer\) or a GGUF file; download a model"),
    ("export NOTES NEW", INPUT, "files/notes: is a file: expected a checkpoint"),
    ("export TINY BUNDLE", INPUT, "a bundle exists there: replace it with --overwrite"),
    ("export TINY NEW --adapter FILES", INPUT, "no base.json in it: expected an adapter folder"),
    # Not even root can create a folder there.
    ("export TINY /proc/self/new", INPUT, "/proc/self: no permission to write in it: choose another folder"),
    ("generate owner/model text", INPUT, "of the Hugging Face hub first: hf download owner/model --local-dir model"),
    ("tune TINY FILES data.jsonl", INPUT, "contains files but no checkpoint: choose another name"),
    ("check nowhere", INPUT, "nowhere: no such folder: expected a bundle"),
    ("check BUNDLE nowhere", INPUT, "nowhere: no such folder: expected a checkpoint"),
    ("check BUNDLE TINY --adapter FILES", INPUT, "no base.json in it: expected an adapter folder"),
    ("inspect BUNDLE --requests 0", USAGE, "--requests is 0: expected at least 1"),
    ("inspect nowhere", INPUT, "^spaceport: nowhere: no such folder: expected a bundle"),
    ("inspect TINY", INPUT, r"\(this is a checkpoint: export it first\)"),
    ("generate", USAGE, "Missing argument 'BUNDLE'"),
    ("check BUNDLE TINY --long-context 1025", USAGE, "--long-context is 1025: expected at most 1024"),
    ("demo nowhere", INPUT, "^spaceport: nowhere: no such folder: expected a checkpoint"),
    ("demo TINY --threads -2", USAGE, "^spaceport: --threads is -2: expected 0"),
    ("demo TINY --max-tokens 0", USAGE, "^spaceport: --max-tokens is 0: expected a whole number of at least 1"),
    ("demo --code", USAGE, "--code without CHECKPOINT: name a chat model"),
    ("demo --code model.gguf --page", USAGE, "--code with --page: expected one of them"),
    ("demo --page --prompt x", USAGE, "--page with --prompt"),
    ("acceptance", USAGE, r"Missing argument 'CHECKPOINT\|BUNDLE\.\.\.'"),
    ("acceptance bundle", USAGE, "Missing argument 'DATA'"),
    ("acceptance BUNDLE PROMPTS --limit 0", USAGE, "--limit is 0: expected a whole number of at least 1"),
    ("acceptance BUNDLE PROMPTS --max-seq-len 1", USAGE, "--max-seq-len is 1: expected 2 to 1024"),
    ("acceptance BUNDLE PROMPTS --save", USAGE, "--save with .*: expected a checkpoint folder"),
    ("acceptance BUNDLE PROMPTS --temperature -1", USAGE, "temperature is -1.0: expected"),
    ("acceptance TINY PROMPTS --save --temperature 0.7", USAGE, "--temperature 0.7: expected greedy answers"),
    ("acceptance TINY PROMPTS --backend onnxruntime", USAGE, "runs in PyTorch: leave --backend out"),
    ("acceptance TINY TINY PROMPTS --save", USAGE, "--save with several models: expected one CHECKPOINT with it"),
    ("acceptance FILES PROMPTS", INPUT, "expected a checkpoint .* or a bundle"),
    ("acceptance BUNDLE nowhere PROMPTS", INPUT, "nowhere: expected a checkpoint .* or a bundle"),
    ("acceptance UNTUNED PROMPTS", INPUT, "no mask token and no heads, so .*spaceport tune"),
    ("acceptance BUNDLE EMPTY", INPUT, "has no prompt"),
    ("acceptance BUNDLE LONG", INPUT, "none of its 1 prompts has less than 1024 tokens"),
    ("audit", USAGE, r"Missing argument 'BUNDLE\.\.\.'"),
    ("audit bundle --limit 3", USAGE, "Missing argument 'PROMPTS'"),
    ("audit BUNDLE PROMPTS --max-tokens 0", USAGE, "--max-tokens is 0: expected a whole number of at least 1"),
    ("audit BUNDLE PROMPTS --max-requests 0", USAGE, "--max-requests is 0: expected 1 to 1024"),
    ("audit BUNDLE PROMPTS --max-tokens 16 --max-seq-len 60", INPUT, r"line 1: 4\d prompt tokens and .* is 60:"),
    ("audit BUNDLE nowhere PROMPTS", INPUT, "nowhere: no such file or folder: expected a bundle"),
    ("audit BUNDLE FILES", INPUT, "expected a prompt file"),
    ("bench steps nowhere", INPUT, "no such folder"),
    ("bench steps BUNDLE --rows a", USAGE, "--rows is 'a': expected comma-separated whole numbers of at least 1"),
    ("bench steps BUNDLE --rows 1,0", USAGE, "--rows is '1,0': expected comma-separated whole numbers of at least 1"),
    ("bench steps BUNDLE --rounds 0", USAGE, "--context is 256 and --rounds 0: expected at least 1 of each"),
    ("bench steps BUNDLE --context 4000", USAGE, "4000 tokens make 4049, the context length is 1024: lower"),
    ("bench steps BUNDLE --replay 0.5,1.1", USAGE, "is '0.5,1.1': expected comma-separated numbers from 0 to 1"),
    ("bench steps BUNDLE --replay 1,1,1,1,1,1", USAGE, "--replay has 6 depths: expected at most 5"),
    ("bench steps BUNDLE --transformers", USAGE, "expected a folder that `spaceport bench random` wrote"),
    ("bench random 900b new", USAGE, "shape is '900b': expected one of tiny, 1b, 7b, 8b"),
    ("bench decode BUNDLE", USAGE, "Missing argument 'PROMPTS'"),
    ("bench decode BUNDLE PROMPTS --max-tokens 0", USAGE, "--max-tokens is 0: expected at least 1"),
    ("bench decode BUNDLE PROMPTS --max-tokens 5000", INPUT, "line 1: "),
    ("bench decode BUNDLE PAGE", INPUT, "README.md line 1: '# Spaceport' is part of a document, not a prompt"),
)


@pytest.fixture
def named(tiny_bundle: Path, tmp_path: Path) -> dict[str, object]:
    """Paths by name."""
    prompts, long, empty = (tmp_path / name for name in ("prompts", "long", "empty"))
    texts = list(json.loads((TINY / "prompts.json").read_text("utf-8")).values())
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[::2]), "utf-8")
    long.write_text(json.dumps({"prompt": "import json\n" * 1000}))
    empty.touch()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "notes").write_text("kept")
    folders = {name.upper(): tmp_path / name for name in ("files", "new", "untuned")}
    files = {"PROMPTS": prompts, "LONG": long, "EMPTY": empty, "PAGE": ROOT / "README.md"}
    files |= {"NOTES": tmp_path / "files" / "notes", "BUNDLE": tiny_bundle, "TINY": TINY}
    return files | folders


@pytest.mark.parametrize(("arguments", "code", "message"), REFUSED)
def test_a_mistake_is_reported_before_any_work(
    named: dict[str, object], capfd: Capture, arguments: str, code: int, message: str
) -> None:
    if "UNTUNED" in arguments:
        ignored = shutil.ignore_patterns("__pycache__", "sar_config.json")
        shutil.copytree(TINY, str(named["UNTUNED"]), ignore=ignored)
    errors = fails(capfd, code, message, *(named.get(part, part) for part in arguments.split()))
    assert not re.search("measuring prompt|warming up|exporting", errors)


# Found only when text is generated: other damage is that of any bundle that is opened.
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (lambda b: put(b, TOKENIZER_FILE, b"{}"), "tokenizer.json: not a readable tokenizer"),
    "no graph": (lambda b: put(b, MODEL_FILE, b"junk"), r"does not load .*model\.onnx: .*export it again"),
    "no data": (lambda b: put(b, "model.onnx.data", b"junk"), r"does not load .*model\.onnx: .*export it again"),
    "other format": (
        lambda b: edit(b, lambda m: m.update(format="float16", signature={**m["signature"], "dtype": "float16"})),
        r"model.onnx: has the .*tensor\(float\).*, the manifest says .*tensor\(float16\).*: export it again",
    ),
    "other window": (
        lambda b: edit(b, lambda m: m["signature"].update(window=8)),
        "model.onnx: has the .*logit_rows.*, the manifest says .*sliding_attention_mask.*: export it again",
    ),
}


def test_a_prompt_that_looks_like_an_option_is_an_error_that_says_how_to_give_it(
    tiny_bundle: Path, tmp_path: Path, capfd: Capture
) -> None:
    bundle = str(tiny_bundle)
    assert run(["generate", bundle, "- The page\n- The service"]) == USAGE
    hint = (
        r"'- The page\n- The service' was read as an option: put -- before a prompt that begins with -, or give it with"
    )
    assert hint in capfd.readouterr().err
    assert run(["generate", bundle, "--no-such", "Why - or not?"]) == USAGE
    assert "No such option" in capfd.readouterr().err
    assert run(["generate", bundle, "--max-tokens", "2", "--", "- The page"]) == OK
    (tmp_path / "prompt").write_text("- The page")
    assert run(["generate", bundle, "--max-tokens", "2", "--prompt-file", str(tmp_path / "prompt")]) == OK


@pytest.mark.parametrize("kind", BROKEN)
def test_files_that_do_not_fit_together_are_an_error_before_any_output(
    damaged: Path, capfd: Capture, kind: str
) -> None:
    damage, message = BROKEN[kind]
    damage(damaged)
    fails(capfd, INPUT, f"(?s){message}", "generate", damaged, "a")


def test_a_damaged_bundle_is_an_input_error_in_every_command(damaged: Path, capfd: Capture) -> None:
    commands: list[list[object]] = [
        ["inspect", damaged],
        ["generate", damaged, "a"],
        ["check", damaged, TINY],
        ["bench", "steps", damaged],
    ]
    manifest = (damaged / MANIFEST_FILE).read_bytes()
    for content, message in (
        (b"{", r"manifest\.json: .*copy the bundle again or export"),
        (manifest, "0 bytes, the manifest says .*: copy the"),
    ):
        (damaged / MANIFEST_FILE).write_bytes(content)
        (damaged / "model.onnx.data").write_bytes(b"")
        for command in commands:
            fails(capfd, INPUT, f"^spaceport: {re.escape(str(damaged))}.*{message}", *command)


def test_a_check_report_of_another_graph_is_ignored(damaged: Path, capfd: Capture) -> None:
    graph, weights = read_manifest(damaged).graph
    unchecked, partly = "not checked yet (spaceport check)", "passed with a part of the cases (spaceport check: all)"
    for content, expected in (
        (json.dumps({"passed": True, "graph": [graph, weights]}), "passed"),
        (json.dumps({"passed": True, "quick": True, "graph": [graph, weights]}), partly),
        (
            json.dumps({"passed": True, "reference": "standard operators int8", "graph": [graph, weights]}),
            "passed; not compared with its checkpoint",
        ),
        (json.dumps({"passed": "no", "graph": [graph, weights]}), "FAILED"),
        (json.dumps({"passed": True, "graph": ["0" * 64, weights]}), unchecked),
        (json.dumps({"passed": True, "graph": [graph, "0" * 64]}), unchecked),
    ):
        (damaged / ACCURACY_FILE).write_text(content)
        assert run(["inspect", str(damaged)]) == OK
        assert capfd.readouterr().out.endswith(f"\nAccuracy: {expected}\n")


def test_a_missing_package_is_named_with_the_command_that_installs_it(tiny_bundle: Path) -> None:
    generate = ["generate", str(tiny_bundle), "a"]
    expected = [
        ("tokenizers", generate, "needs the package tokenizers, .*pip install .*"),
        ("onnxruntime", generate, r"backend onnxruntime needs the package onnxruntime, .*pip install .*\[cpu\]'"),
        ("torch", ["export", str(TINY), "no"], r"`spaceport export` needs the package torch, .*pip .*\[export\]'"),
    ]
    commands = json.dumps([[package, command] for package, command, _ in expected])
    done = subprocess.run([sys.executable, "-c", WITHOUT, commands], capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert (lines[1::2], done.stdout) == ([str(MISSING)] * len(expected), "")
    for line, (*_, message) in zip(lines[::2], expected, strict=True):
        assert re.fullmatch(f"spaceport: .*{message}", line)


def test_a_closed_pipe_is_no_error_message(tiny_bundle: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "generate", str(tiny_bundle), LONG]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (OK, FAULT)  # what was written before the reader left may have been all


def test_a_closed_stream_is_an_empty_one(tiny_bundle: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, prompt, code in (("stdin", "-", USAGE), ("stdout", "a", OK)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["spaceport", "generate", str(tiny_bundle), prompt, "--max-tokens", "3"])
            patch.setattr(sys, stream, None)
            with pytest.raises(SystemExit) as ended:
                main()
        assert ended.value.code == code
    assert "standard input is empty: expected PROMPT" in capfd.readouterr().err


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


def test_only_unexpected_errors_are_called_a_bug(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, known in ((EngineFault("the engine failed in step 3"), True), (ZeroDivisionError("division"), False)):
        monkeypatch.setattr(cli, "main", Mock(side_effect=error))
        assert run(["generate"]) == FAULT
        errors = capfd.readouterr().err
        assert ("this is a bug in spaceport" in errors) != known
        assert (errors == f"spaceport: {error}\n") == known


def test_wrong_paths_are_refused_without_importing_torch(named: dict[str, object]) -> None:
    commands = [words.split() for words, code, _ in REFUSED if code == INPUT]
    light = [words for words in commands if words[0] in ("export", "generate", "tune", "check", "inspect")]
    given = json.dumps([[str(named.get(word, word)) for word in words] for words in [*light, ["build", "nowhere"]]])
    done = subprocess.run([sys.executable, "-c", IMPORTS, given], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
