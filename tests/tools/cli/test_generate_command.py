"""`spaceport generate`: every option has its effect, and the printed output is the generated one."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import pytest

from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.messages import ChatPrompt
from spaceport.tools.cli import INPUT, OK, USAGE, run
from spaceport.tools.cli.generate import command, decoding_of
from support.paths import TINY
from support.small_bundle import edit, forking_copy

DECODER: str = json.loads((TINY / "prompts.json").read_text("utf-8"))["begin of json/decoder.py"]
TIMES = {"waiting_seconds", "engine_seconds", "outside_seconds", "first_token_seconds", "seconds"}

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def forking(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forking_copy(tiny_bundle, tmp_path_factory.mktemp("forking") / "bundle")


@pytest.fixture(scope="module")
def runtime(forking: Path) -> Iterator[Runtime]:
    with Runtime.open(forking, threads=1, max_seq_len=256, max_slots=512, step_costs="standard") as opened:
        yield opened


def printed(capfd: Capture, bundle: Path, *arguments: object) -> tuple[str, str]:
    """What a command prints on stdout and stderr."""
    runtime = "--max-seq-len 256 --max-slots 512 --threads 1 --step-costs standard"
    assert run(["generate", str(bundle), DECODER, *runtime.split(), *map(str, arguments)]) == OK, capfd.readouterr().err
    out, err = capfd.readouterr()
    return out, err


def without_times(statistics: dict[str, object]) -> dict[str, object]:
    assert statistics.keys() >= TIMES
    return {name: value for name, value in statistics.items() if name not in TIMES}


OPTIONS: list[tuple[list[object], Decoding]] = [
    ([], Decoding()),
    (["--max-tokens", 40], Decoding(max_tokens=40)),
    (["--stop", "zz", "--stop", "JSON"], Decoding(stop=("zz", "JSON"))),
    (["--stop-token-id", 362, "--stop-token-id", 5], Decoding(stop_token_ids=(362, 5))),
    (["--stop", "JSON", "--include-stop"], Decoding(stop=("JSON",), include_stop=True)),
    (["--mask-slots", 0], Decoding(mask_slots=0)),
    (["--draft", "chain"], Decoding(draft="chain")),
    (["--draft-siblings", 1], Decoding(draft_siblings=1)),
    (["--lookup", 0], Decoding(lookup=0)),
    (["--lookup", 3, "--mask-slots", 0, "--draft-rows", 3], Decoding(lookup=3, mask_slots=0, draft_rows=3)),
    (["--no-fork"], Decoding(fork=False)),
    (["--fork"], Decoding(fork=True)),
    (["--max-depth", 2], Decoding(max_depth=2)),
    (["--temperature", 0.9, "--seed", 3], Decoding(sampling=Sampling(0.9, seed=3))),
    (["--temperature", 0.9, "--seed", 3, "--top-p", 0.5], Decoding(sampling=Sampling(0.9, top_p=0.5, seed=3))),
    (["--temperature", 1, "--top-k", 5, "--min-p", 0.1], Decoding(sampling=Sampling(1.0, top_k=5, min_p=0.1))),
    (["--repetition-penalty", 1.5], Decoding(sampling=Sampling(repetition_penalty=1.5))),
    (["--logit-bias", "362=-9", "--logit-bias", "5=3"], Decoding(sampling=Sampling(logit_bias={362: -9, 5: 3}))),
    (["--logprobs", 1], Decoding(logprobs=1)),
    (["--regex", "[a-z =]+"], Decoding(grammar=Grammar(regex="[a-z =]+"))),
]


@pytest.mark.parametrize(("arguments", "decoding"), OPTIONS)
def test_an_option_is_the_python_option(arguments: list[object], decoding: Decoding) -> None:
    given = command.make_context("generate", ["bundle", "prompt", *map(str, arguments)]).params
    assert decoding_of(given) == decoding


def test_json_has_everything_of_a_completion(forking: Path, runtime: Runtime, capfd: Capture) -> None:
    decoding = Decoding(max_tokens=60, logprobs=2, sampling=Sampling(banned=(362, 322)))
    expected = runtime.generate(DECODER, decoding)
    options = ("--max-tokens", 60, "--logprobs", 2, "--ban", "362", "--ban", "JSON", "--json")
    found = json.loads(printed(capfd, forking, *options)[0])
    assert (found["text"], found["ending"], found["seed"]) == (expected.text, expected.ending, None)
    assert (tuple(found["tokens"]), tuple(found["prompt_tokens"])) == (expected.tokens, expected.prompt_tokens)
    assert [one["logprob"] for one in found["logprobs"]] == [one.logprob for one in expected.logprobs]
    assert [one["token"] for one in found["logprobs"]] == found["tokens"]
    assert {len(one["top"]) for one in found["logprobs"]} == {2}
    root = found["threads"][0]
    joined = b"".join(bytes(one["bytes"]) for one in root["logprobs"] if one["text"] != "\n")  # its [Fork] token
    assert joined.decode() == root["text"]
    assert [len(thread.pop("logprobs")) for thread in found["threads"]] == [len(t.logprobs) for t in expected.threads]
    threads = [asdict(replace(thread, logprobs=())) for thread in expected.threads]
    assert [{**thread, "logprobs": []} for thread in found["threads"]] == json.loads(json.dumps(threads))
    assert found["statistics"].pop("tokens_per_second") > 0
    assert without_times(found["statistics"]) == without_times(asdict(expected.statistics)) | {
        name: getattr(expected.statistics, name)
        for name in ("tokens_per_step", "acceptance_rate", "mean_acceptance_length")
    }


def test_output_is_printed_in_reading_order_and_marks_change_nothing_else(
    forking: Path, runtime: Runtime, capfd: Capture
) -> None:
    expected = runtime.generate(DECODER, Decoding(max_tokens=60))
    assert len(expected.threads) == 5
    assert printed(capfd, forking, "--max-tokens", 60) == (f"{expected.text}\n", "")
    arguments = ("--max-tokens", 60, "--stop", "[", "--stop", "]")  # so that every bracket is a mark
    plain, _ = printed(capfd, forking, *arguments)
    marked, _ = printed(capfd, forking, *arguments, "--show-drafts")
    assert len(plain) > 30
    assert marked.count("[") == marked.count("]") > 0
    assert marked.replace("[", "").replace("]", "") == plain
    marked, _ = printed(capfd, forking, "--max-tokens", 40, "--no-fork", "--show-drafts")
    pieces = [(piece.text, piece.drafted) for piece in runtime.stream(DECODER, Decoding(max_tokens=40, fork=False))]
    runs = [("".join(text for text, _ in run), drafted) for drafted, run in groupby(pieces, lambda one: one[1])]
    assert marked == "".join(f"[{text}]" if drafted else text for text, drafted in runs) + "\n"


def test_statistics_show_the_cost_and_the_seed_that_reproduces_an_output(
    forking: Path, runtime: Runtime, capfd: Capture
) -> None:
    arguments = ("--temperature", 1, "--max-tokens", 30)
    first, other = (json.loads(printed(capfd, forking, *arguments, "--json")[0]) for _ in range(2))
    assert other["seed"] != first["seed"]
    assert other["text"] != first["text"]
    assert 0 <= first["seed"] < 2**64
    out, err = printed(capfd, forking, *arguments, "--seed", first["seed"], "--stats")
    assert out == first["text"] + "\n"
    s = runtime.generate(DECODER, Decoding(max_tokens=30, sampling=Sampling(1.0, seed=first["seed"]))).statistics
    tokens, threads, drafts, *_, seed = err.splitlines()
    assert tokens.startswith(f"{s.tokens} tokens in {s.steps} steps ({s.tokens_per_step:.2f} tokens per step)")
    several = f"{s.threads} threads (at most {s.peak_threads} at once), " if s.threads > 1 else ""
    assert threads.startswith(f"{several}peak {s.peak_slots} KV slots")
    assert drafts.startswith(f"draft tokens: {sum(s.accepted_by_depth)} of {sum(s.drafted_by_depth)} accepted")
    assert seed == f"seed {first['seed']}: repeat with --seed {first['seed']} for the same output"


def test_a_trace_and_a_report_are_written(forking: Path, tmp_path: Path, capfd: Capture) -> None:
    trace, report = tmp_path / "t.json", tmp_path / "r.html"
    plain, _ = printed(capfd, forking, "--max-tokens", 60, "--json")
    found, told = printed(capfd, forking, "--max-tokens", 60, "--json", "--trace", trace, "--report", report)
    assert told == f"{trace}: trace written\n{report}: report written\n"
    shown, statistics = json.loads(found), json.loads(found)["statistics"]
    assert shown["text"] == json.loads(plain)["text"]
    record = json.loads(trace.read_text("utf-8"))
    assert len(record["steps"]) == statistics["steps"] + statistics["prompt_steps"]
    assert [line["path"] for line in record["threads"]] == [thread["path"] for thread in shown["threads"]]
    assert report.read_text("utf-8").startswith("<!doctype html>")
    assert "Generation of bundle" in report.read_text("utf-8")


def test_a_system_message_and_template_variables_are_part_of_the_chat(
    forking: Path, runtime: Runtime, capfd: Capture
) -> None:
    chat = ["--chat", "--system", "Be brief.", "--chat-template-kwargs", '{"bos_token": "ship"}']
    found = json.loads(printed(capfd, forking, *chat, "--json", "--max-tokens", 1)[0])["prompt_tokens"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": DECODER}]
    assert found == runtime.tokens_of(ChatPrompt(messages, template_kwargs={"bos_token": "ship"}))
    assert found != runtime.tokens_of(messages)


def refused(capfd: Capture, message: str, bundle: Path, *arguments: object, code: int = USAGE) -> None:
    assert run(["generate", str(bundle), *map(str, arguments)]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert re.search(message, err), err
    assert "Traceback" not in err


# What Decoding and Sampling refuse by themselves has tests of its own; these are options, and the names of flags.
WRONG: list[tuple[list[object], str]] = [
    (["a", "--prompt-file", __file__], "PROMPT and --prompt-file are both given: expected PROMPT"),
    (["a", "--mask-slots", 6], "--mask-slots is 6: expected 0 to 5, the number that the bundle was exported with"),
    (["a", "--max-total-tokens", 5000], r"make 5002 slots, --max-slots is 1024: lower .* to 1022, or"),
    (["a", "--chat", "--chat-template-kwargs", "{"], "--chat-template-kwargs: .*: expected a JSON object"),
    (["a", "--lookup", 3, "--draft", "chain"], "--lookup is 3 with --draft chain: it applies to --draft tree only"),
    (["a", "--regex", "a", "--fork"], "--fork is True with a grammar: a constrained completion cannot fork"),
    (["a", "--draft-rows", 3, "--mask-slots", 0], "--draft-rows has no effect with .* 0: turn mask slots or --lookup"),
    (["a", "--json", "--show-drafts"], "--show-drafts has no effect with --json"),
    (["a", "--seed", 0], "--seed has no effect without --temperature: add --temperature 1, or leave it out"),
    (["a", "--logit-bias", "word=1"], "--logit-bias is 'word=1': expected a token id and a number, such as 42=-1.5"),
    (["a", "--logit-bias", "5=1", "--logit-bias", "5=2"], "--logit-bias names token 5 twice: expected one number"),
    (["a", "--ban", "class JSON"], r"--ban 'class JSON' is \d+ tokens, \[\d+, .*: expected one token; give its id"),
    (["a", "--json-schema", TINY / "README.md"], "--json-schema is not JSON: .*: expected a schema such as"),
    (["a", "--report", "nowhere/r.html"], "nowhere/r.html: the folder .*nowhere does not exist: create it first"),
    (["a", "--trace", "same", "--report", "./same"], "--trace and --report are both same: expected two files"),
    (["a", "--logprobs", 2], "--logprobs has no effect without --json"),
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
    edit(plain, lambda manifest: manifest["drafts"].update(max_tokens=0) or manifest["tokens"].update(mask=[]))
    refused(capfd, "--mask-slots is 1: expected 0, since the bundle has no mask token", plain, "a", "--mask-slots", 1)
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
    refused(capfd, f"{file}: {unreadable}", forking, "a", "--json-schema", file, code=INPUT)
    file.write_text(json.dumps({"type": "array", "items": {"enum": ["a", 1]}, "minItems": 2, "maxItems": 2}))
    assert run(["generate", str(forking), "a", "--json-schema", str(file)]) == OK
    assert len(json.loads(capfd.readouterr().out)) == 2
    wrong = r"byte 2 \(0xff\) is not valid UTF-8: expected UTF-8 text"
    file.write_bytes(b"ab\xffc")
    refused(capfd, f"{file}: {wrong}", forking, "--prompt-file", file, code=INPUT)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xffc")))
    refused(capfd, f"standard input: {wrong}", forking, "-", code=INPUT)
    refused(capfd, f"spaceport: the prompt: {wrong}", forking, "ab\udcffc", code=INPUT)


def test_the_prompt_comes_from_standard_input_unless_that_is_a_terminal_or_empty(
    forking: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ("--max-tokens", "8", "--threads", "1", "--step-costs", "standard")

    def generated(piped: bytes, *arguments: str, terminal: bool = False) -> int:
        stdin = io.TextIOWrapper(io.BytesIO(piped))
        monkeypatch.setattr(stdin, "isatty", lambda: terminal)
        monkeypatch.setattr(sys, "stdin", stdin)
        return run(["generate", str(forking), *arguments, *short])

    assert generated(b"", DECODER) == OK
    expected = capfd.readouterr().out
    for arguments in ((), ("-",)):
        assert generated(DECODER.encode(), *arguments) == OK
        assert capfd.readouterr().out == expected
    for terminal, message in ((True, "no prompt: expected PROMPT, --prompt-file FILE"), (False, "input is empty:")):
        assert generated(b"", terminal=terminal) == USAGE
        assert message in capfd.readouterr().err
