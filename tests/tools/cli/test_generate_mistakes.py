"""Invalid options of `spaceport generate`: one line says what came, what was expected and what to do; no output."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, OK, USAGE
from support.forking_bundle import forking_copy
from support.paths import TINY
from support.small_bundle import edit

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def forking(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forking_copy(tiny_bundle, tmp_path_factory.mktemp("forking") / "bundle")


def refused(capfd: Capture, message: str, bundle: Path, *arguments: object) -> None:
    assert run(["generate", str(bundle), "a", *map(str, arguments)]) == USAGE
    out, err = capfd.readouterr()
    assert out == ""
    assert re.search(message, err), err
    assert "Traceback" not in err


WRONG: list[tuple[list[object], str]] = [
    (["--max-total-tokens", 0], "--max-total-tokens is 0: expected at least 1"),
    (
        ["--max-total-tokens", 5000],
        r"--max-total-tokens 5000 make 5002 slots, --max-slots is 1024: lower .* to 1022, or",
    ),
    (["--max-slots", 9], "--max-slots is 9: expected at least --max-seq-len, 1024"),
    (["--max-slots", -1], "--max-slots is -1: expected at least --max-seq-len, 1024"),
    (["--timeout", 0], "--timeout is 0.0: expected a number of seconds above 0"),
    (["--timeout", "nan"], "--timeout is nan: expected a number of seconds above 0"),
    (["--system", "Be brief."], "--system has no effect without --chat: add --chat, or leave it out"),
    (["--chat-template-kwargs", "{}"], "--chat-template-kwargs has no effect without --chat: add --chat"),
    (["--chat", "--chat-template-kwargs", "{"], "--chat-template-kwargs: .*: expected a JSON object"),
    (["--chat", "--chat-template-kwargs", "[1]"], r"--chat-template-kwargs is '\[1\]': expected a JSON object"),
    (["--chat", "--chat-template-kwargs", '{"tools": 1}'], "names 'tools': expected another variable"),
    (["--timeout", "soon"], "'soon' is not a valid float"),
    (["--draft", "bush"], "'bush' is not one of 'chain', 'tree'"),
    (["--draft-rows", 0], "--draft-rows is 0: expected at least 1"),
    (["--draft-siblings", 0], "--draft-siblings is 0: expected at least 1"),
    (["--lookup", -1], "--lookup is -1: expected at least 0"),
    (
        ["--lookup", 3, "--draft", "chain"],
        "--lookup is 3 with --draft chain: it applies to --draft tree only: leave one",
    ),
    (["--draft-rows", 3, "--draft", "chain"], "--draft-rows has no effect with --draft chain"),
    (["--draft-siblings", 3, "--draft", "chain"], "--draft-siblings has no effect with --draft chain"),
    (["--draft-siblings", 3, "--mask-slots", 0, "--lookup", 2], "--draft-siblings has no effect with --mask-slots 0"),
    (
        ["--draft-rows", 3, "--mask-slots", 0],
        "--draft-rows has no effect with --mask-slots 0: turn mask slots or --lookup on, or leave",
    ),
    (["--draft", "tree", "--mask-slots", 0], "--draft has no effect with --mask-slots 0"),
    (["--max-threads", 0], "--max-threads is 0: expected 1 to 128"),
    (["--max-threads", 129], "--max-threads is 129: expected 1 to 128"),
    (["--max-depth", -1], "--max-depth is -1: expected at least 0"),
    (["--max-threads", 2, "--no-fork"], "--max-threads has no effect with --no-fork"),
    (["--max-depth", 2, "--no-fork"], "--max-depth has no effect with --no-fork"),
    (["--json", "--show-drafts"], "--show-drafts has no effect with --json"),
    (["--temperature", -1], "--temperature is -1.0: expected a number from 0 to 100"),
    (["--temperature", "nan"], "--temperature is nan: expected a number from 0 to 100"),
    (["--temperature", "inf"], "--temperature is inf: expected a number from 0 to 100"),
    (["--temperature", 1, "--top-k", -1], "--top-k is -1: expected"),
    (["--temperature", 1, "--top-p", 1.5], "--top-p is 1.5: expected a number from 0 to 1"),
    (["--temperature", 1, "--min-p", "nan"], "--min-p is nan: expected a number from 0 to 1"),
    (["--temperature", 1, "--seed", -1], "--seed is -1: expected"),
    (["--seed", 1], "--seed has no effect without --temperature: add --temperature 1, or leave it out"),
    (["--seed", 0], "--seed has no effect without --temperature: add --temperature 1, or leave it out"),
    (["--top-k", 5, "--temperature", 0], "--top-k has no effect without --temperature"),
    (["--top-p", 0.5], "--top-p has no effect without --temperature"),
    (["--min-p", 0.5], "--min-p has no effect without --temperature"),
    (["--repetition-penalty", 0], "--repetition-penalty is 0.0: expected a number from 0.01 to 100"),
    (["--presence-penalty", 3], "--presence-penalty is 3.0: expected a number from -2 to 2"),
    (["--frequency-penalty", "nan"], "--frequency-penalty is nan: expected a number from -2 to 2"),
    (["--logit-bias", "5"], "--logit-bias is '5': expected a token id and a number, such as 42=-1.5"),
    (["--logit-bias", "word=1"], "--logit-bias is 'word=1': expected a token id and a number, such as 42=-1.5"),
    (["--logit-bias", "5=1", "--logit-bias", "5=2"], "--logit-bias names token 5 twice: expected one number per token"),
    (["--logit-bias", "5=nan"], "the --logit-bias of token 5 is nan: expected"),
    (["--logit-bias", "640=1"], "--logit-bias holds the token id 640: expected ids from 0 to 639"),
    (["--logit-bias", "-1=1"], "a token id in --logit-bias is -1: expected"),
    (["--ban", "640"], "--ban holds the token id 640: expected ids from 0 to 639"),
    (["--ban", "class JSON"], r"--ban 'class JSON' is \d+ tokens, \[\d+, .*: expected one token; give its id"),
    (["--ban", ""], r"--ban '' is 0 tokens, \[\]: expected one token; give its id"),
    (["--regex", "("], r"the regular expression '\('"),
    (["--regex", ""], "--regex is '': expected a regular expression of at least one character"),
    (
        ["--regex", "a", "--json-schema", TINY / "config.json"],
        "--regex and --json-schema are both given: expected one of them",
    ),
    (["--json-schema", TINY / "README.md"], "--json-schema is not JSON: .*: expected a schema such as"),
    (["--regex", "a", "--fork"], "--fork is True with a grammar: a constrained completion cannot fork"),
    (["--regex", "a", "--max-threads", 2], "--max-threads has no effect with --regex"),
    (["--json-schema", "s", "--max-depth", 2], "--max-depth has no effect with --json-schema"),
    (["--trace", "/"], "/: is not a file: expected the name of a new file"),
    (["--report", TINY], "tiny: is not a file: expected the name of a new file"),
    (["--report", "nowhere/r.html"], "nowhere/r.html: the folder .*nowhere does not exist: create it first"),
    (["--trace", "same", "--report", "./same"], "--trace and --report are both same: expected two files"),
    (["--json", "--logprobs", -1], "--logprobs is -1: expected"),
    (["--json", "--logprobs", 641], "--logprobs is 641: expected at most 20"),
    (["--logprobs", 2], "--logprobs has no effect without --json"),
    (["--live"], "--live needs a terminal, and standard output is none: leave it out, or use --show-drafts"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_an_invalid_option_is_an_error(forking: Path, capfd: Capture, arguments: list[object], message: str) -> None:
    refused(capfd, message, forking, *arguments)


def test_an_option_that_the_bundle_does_not_support_is_an_error(
    tiny_bundle: Path, tmp_path: Path, capfd: Capture
) -> None:
    refused(
        capfd, "--fork is True: expected a bundle with a fork token, this one has none: leave", tiny_bundle, "--fork"
    )
    refused(capfd, "--max-threads has no effect with a bundle without a fork token", tiny_bundle, "--max-threads", 2)
    plain = shutil.copytree(tiny_bundle, tmp_path / "plain")
    edit(plain, lambda manifest: manifest.update(max_mask_slots=0, tokens={**manifest["tokens"], "mask": []}))
    message = "has no effect with a bundle without mask slots"
    refused(capfd, f"--draft-siblings {message}: export the bundle with mask", plain, "--draft-siblings", 2)
    refused(capfd, f"--draft-rows {message}: turn mask slots or --lookup on", plain, "--draft-rows", 2, "--lookup", 0)
    assert run(["generate", str(plain), "a", "--draft-rows", "2", "--max-tokens", "3"]) == OK


def test_a_missing_schema_file_is_an_input_error(forking: Path, tmp_path: Path, capfd: Capture) -> None:
    file = tmp_path / "schema.json"
    assert run(["generate", str(forking), "a", "--json-schema", str(file)]) == INPUT
    assert f"{file}: No such file or directory: expected a text file that can be read" in capfd.readouterr().err
    file.write_text(json.dumps({"type": "array", "items": {"enum": ["a", 1]}, "minItems": 2, "maxItems": 2}))
    assert run(["generate", str(forking), "a", "--json-schema", str(file)]) == OK
    assert len(json.loads(capfd.readouterr().out)) == 2
