"""Invalid options of `spaceport generate`: one line says what came, what was expected and what to do; no output."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, OK, USAGE
from support.forking_bundle import forking_copy
from support.paths import TINY
from support.small_bundle import edit

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def forking(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forking_copy(tiny_bundle, tmp_path_factory.mktemp("forking") / "bundle")


def refused(capfd: Capture, message: str, bundle: Path, *arguments: object, code: int = USAGE) -> None:
    assert run(["generate", str(bundle), *map(str, arguments)]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert re.search(message, err), err
    assert "Traceback" not in err


# What Decoding and Sampling refuse by themselves has tests of its own; these are options, and the names of flags.
WRONG: list[tuple[list[object], str]] = [
    ([], "no prompt: expected either PROMPT .- reads standard input. or --prompt-file FILE"),
    (["a", "--prompt-file", __file__], "PROMPT and --prompt-file are both given: expected either"),
    ([""], "the prompt is empty: expected at least one character"),
    (
        ["a", "--max-tokens", 5000],
        "2 prompt tokens and --max-tokens 5000 make 5002, --max-seq-len is 1024, .*: lower --max-tokens to 1022",
    ),
    (["a", "--max-seq-len", 1025], "--max-seq-len is 1025: expected 2 to 1024, the model.s limit"),
    (["a", "--mask-slots", 6], "--mask-slots is 6: expected 0 to 5, the number that the bundle was exported with"),
    (["a", "--threads", -1], r"--threads is -1: expected 0 \(one for each core\) to \d+"),
    (["a", "--backend", "torch"], "--backend torch runs the PyTorch checkpoint: name its folder with --checkpoint"),
    (["a", "--checkpoint", TINY], "--checkpoint has no effect without --backend torch: add --backend torch, or leave"),
    (["a", "--backend", "cuda"], "'cuda' is not one of 'auto', 'tensorrt', .*'onnxruntime', 'torch'"),
    (["a", "--max-total-tokens", 5000], r"make 5002 slots, --max-slots is 1024: lower .* to 1022, or"),
    (["a", "--timeout", "nan"], "--timeout is nan: expected a number of seconds above 0"),
    (["a", "--system", "Be brief."], "--system has no effect without --chat: add --chat, or leave it out"),
    (["a", "--chat", "--chat-template-kwargs", "{"], "--chat-template-kwargs: .*: expected a JSON object"),
    (["a", "--chat", "--chat-template-kwargs", '{"tools": 1}'], "names 'tools': expected another variable"),
    (["a", "--lookup", 3, "--draft", "chain"], "--lookup is 3 with --draft chain: it applies to --draft tree only"),
    (["a", "--draft-rows", 3, "--draft", "chain"], "--draft-rows has no effect with --draft chain"),
    (
        ["a", "--draft-siblings", 3, "--mask-slots", 0, "--lookup", 2],
        "--draft-siblings has no effect with --mask-slots 0",
    ),
    (["a", "--draft-rows", 3, "--mask-slots", 0], "--draft-rows has no effect with .* 0: turn mask slots or --lookup"),
    (["a", "--draft", "tree", "--mask-slots", 0], "--draft has no effect with --mask-slots 0"),
    (["a", "--max-threads", 2, "--no-fork"], "--max-threads has no effect with --no-fork"),
    (["a", "--json", "--show-drafts"], "--show-drafts has no effect with --json"),
    (["a", "--temperature", 1, "--top-p", 1.5], "--top-p is 1.5: expected a number from 0 to 1"),
    (["a", "--seed", 0], "--seed has no effect without --temperature: add --temperature 1, or leave it out"),
    (["a", "--top-k", 5, "--temperature", 0], "--top-k has no effect without --temperature"),
    (["a", "--logit-bias", "word=1"], "--logit-bias is 'word=1': expected a token id and a number, such as 42=-1.5"),
    (["a", "--logit-bias", "5=1", "--logit-bias", "5=2"], "--logit-bias names token 5 twice: expected one number"),
    (["a", "--logit-bias", "5=nan"], "the --logit-bias of token 5 is nan: expected"),
    (["a", "--ban", "640"], "--ban holds the token id 640: expected ids from 0 to 639"),
    (["a", "--ban", "class JSON"], r"--ban 'class JSON' is \d+ tokens, \[\d+, .*: expected one token; give its id"),
    (["a", "--regex", ""], "--regex is '': expected a regular expression of at least one character"),
    (["a", "--regex", "a", "--json-schema", TINY / "config.json"], "are both given: expected one of them"),
    (["a", "--json-schema", TINY / "README.md"], "--json-schema is not JSON: .*: expected a schema such as"),
    (["a", "--regex", "a", "--fork"], "--fork is True with a grammar: a constrained completion cannot fork"),
    (["a", "--regex", "a", "--max-threads", 2], "--max-threads has no effect with --regex"),
    (["a", "--report", "nowhere/r.html"], "nowhere/r.html: the folder .*nowhere does not exist: create it first"),
    (["a", "--trace", "same", "--report", "./same"], "--trace and --report are both same: expected two files"),
    (["a", "--json", "--logprobs", 641], "--logprobs is 641: expected at most 20"),
    (["a", "--logprobs", 2], "--logprobs has no effect without --json"),
    (["a", "--live"], "--live needs a terminal, and standard output is none: leave it out, or use --show-drafts"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_an_invalid_option_is_an_error(forking: Path, capfd: Capture, arguments: list[object], message: str) -> None:
    refused(capfd, message, forking, *arguments)


def test_an_option_that_the_bundle_does_not_support_is_an_error(
    tiny_bundle: Path, tmp_path: Path, capfd: Capture
) -> None:
    refused(capfd, "--fork is True: expected a bundle with a fork token, .*: leave", tiny_bundle, "a", "--fork")
    message = "--max-threads has no effect with a bundle without a fork token"
    refused(capfd, message, tiny_bundle, "a", "--max-threads", 2)
    plain = shutil.copytree(tiny_bundle, tmp_path / "plain")
    edit(plain, lambda manifest: manifest.update(max_mask_slots=0, tokens={**manifest["tokens"], "mask": []}))
    message = "has no effect with a bundle without mask slots"
    for option, rest in (("--draft-siblings", "export the bundle with mask"), ("--draft-rows", "turn mask slots or")):
        refused(capfd, f"{option} {message}: {rest}", plain, "a", option, 2, "--lookup", 0)
    refused(capfd, "--mask-slots is 1: expected 0, since the bundle has no mask token", plain, "a", "--mask-slots", 1)
    arguments = ["--mask-slots", "0", "--draft-rows", "2", "--lookup", "1", "--max-tokens", "3"]
    assert run(["generate", str(plain), "a", *arguments]) == OK
    capfd.readouterr()
    edit(plain, lambda manifest: manifest["files"].pop(TEMPLATE_FILE))
    refused(capfd, "--chat: .* has no chat template: leave --chat out and give a plain prompt", plain, "a", "--chat")
    edit(plain, lambda manifest: manifest.update(max_positions=2**31 - 1))
    message = r"\d+\.\d GB of KV buffers for \d+ slots do not fit into memory: lower --max-seq-len"
    refused(capfd, message, plain, "a", "--max-seq-len", 2**31 - 1)


def test_files_that_cannot_be_read_are_input_errors(
    forking: Path, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "schema.json"
    unreadable = "No such file or directory: expected a text file that can be read"
    for option in (("a", "--json-schema"), ("--prompt-file",)):
        refused(capfd, f"{file}: {unreadable}", forking, *option, file, code=INPUT)
    file.write_text(json.dumps({"type": "array", "items": {"enum": ["a", 1]}, "minItems": 2, "maxItems": 2}))
    assert run(["generate", str(forking), "a", "--json-schema", str(file)]) == OK
    assert len(json.loads(capfd.readouterr().out)) == 2
    refused(capfd, "Is a directory: expected a text file", forking, "--prompt-file", tmp_path, code=INPUT)
    wrong = r"byte 2 \(0xff\) is not valid UTF-8: expected UTF-8 text"
    file.write_bytes(b"ab\xffc")
    refused(capfd, f"{file}: {wrong}", forking, "--prompt-file", file, code=INPUT)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xffc")))
    refused(capfd, f"standard input: {wrong}", forking, "-", code=INPUT)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    refused(capfd, "the prompt is empty", forking, "-")
    refused(capfd, f"spaceport: the prompt: {wrong}", forking, "ab\udcffc", code=INPUT)
