"""Distillation: prompts get the model's own answers, in order, resumable, as data that training reads."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from spaceport.exporter.atomic_folder import write_manifest
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE, TEMPLATE_FILE, TOKENIZER_FILE
from spaceport.runtime.bundle import Bundle, read_manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import INPUT, INTERRUPTED, OK, USAGE, run
from spaceport.training import distill as distillations
from spaceport.training.conversations import Turn, read_conversations
from spaceport.training.distill import AnswerPrompt, DistillOptions, partial_file, read_prompts
from support.hash_engine import Language
from support.hash_runtime import WORDS, hash_runtime
from support.paths import TINY

Capture = pytest.CaptureFixture[str]

KNOWN = ("scanner", "encoder", "tool")  # the tiny model answers with the first lines of these files
TEXT = next(iter(json.loads((TINY / "prompts.json").read_text("utf-8")).values()))
LIMITS = ("--max-tokens", "60", "--max-seq-len", "256", "--threads", "1")


def asked(name: str) -> dict[str, str]:
    return {"role": "user", "content": f"How does json/{name}.py begin?"}


LINES: list[dict[str, Any]] = [
    {"kind": "one", "messages": [asked("scanner")]},
    {"kind": "two", "messages": [asked("encoder"), asked("tool")]},
    {"prompt": "How does json/tool.py begin?", "id": 3},
    {"messages": [{"role": "system", "content": "Hello."}, asked("scanner"), asked("scanner"), asked("encoder")]},
    {"messages": [asked("tool"), {"role": "assistant", "content": "Given."}, asked("tool")]},
    {"messages": [asked("encoder"), {"role": "assistant", "content": "Not this."}]},
    {"prompt": "long " * 260, "id": 7},
    {"prompt": "x", "id": 8},
]


def written(folder: Path, lines: list[dict[str, Any]], name: str = "prompts.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return file


def distill(bundle: Path, prompts: Path, out: Path, *more: str) -> int:
    return run(["distill", str(bundle), str(prompts), str(out), *LIMITS, *more])


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def roles(record: dict[str, Any]) -> list[str]:
    return [turn["role"] for turn in record["messages"]]


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(tiny_bundle, max_seq_len=256, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def whole(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an uninterrupted run over LINES, one answer at a time."""
    folder = tmp_path_factory.mktemp("distill")
    assert distill(tiny_bundle, written(folder, LINES), folder / "out.jsonl", "--max-requests", "1") == OK
    return folder / "out.jsonl"


def test_each_answer_is_the_plain_greedy_one_and_sees_the_earlier_ones(whole: Path, runtime: Runtime) -> None:
    assert runtime.bundle.manifest.drafts.mask_slots > 0
    plain = Decoding(max_tokens=60, mask_slots=0, lookup=0)
    for record in records(whole):
        turns = record["messages"]
        for index, turn in enumerate(turns):
            if turn["role"] != "assistant" or turn["content"] == "Given.":
                continue
            completion = runtime.generate(turns[:index], plain)
            finished = record.get("ends", True) or index + 1 < len(turns)
            assert completion.text == turn["content"]
            assert (completion.ending == "end") == finished


def test_sampled_answers_are_the_same_however_many_are_generated_at_the_same_time(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    lines = [{"prompt": f"How does json/{name}.py begin?"} for name in KNOWN] * 2
    prompts, texts = written(tmp_path, lines), []
    for requests in ("1", "6"):
        out = tmp_path / f"{requests}.jsonl"
        assert distill(tiny_bundle, prompts, out, "--max-requests", requests, "--temperature", "1.5") == OK
        texts.append([record["messages"][1]["content"] for record in records(out)])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 6  # each line has a seed of its own
    with pytest.raises(OptionFault, match="temperature is -1: expected a number from 0 to 100"):
        DistillOptions(temperature=-1)


def test_lines_have_the_order_and_the_other_keys_of_the_prompts(whole: Path) -> None:
    found = records(whole)
    assert [{key: record[key] for key in record if key in ("kind", "id")} for record in found] == [
        *({"kind": "one"}, {"kind": "two"}, {"id": 3}, {}, {}, {}, {"id": 8}),
    ]
    assert all(next(iter(record)) == "messages" and "prompt" not in record for record in found)
    assert roles(found[1]) == ["user", "assistant"] * 2
    assert [turn["content"] for turn in found[1]["messages"][::2]] == [asked(name)["content"] for name in KNOWN[1:]]
    assert roles(found[3])[:3] == ["system", "user", "assistant"]
    assert [turn["content"] for turn in found[4]["messages"][:2]] == [asked("tool")["content"], "Given."]
    assert roles(found[5]) == ["user", "assistant"]
    assert "Not this." not in whole.read_text("utf-8")


@pytest.mark.parametrize("after", [0, 3])
def test_several_requests_also_of_an_interrupted_run_write_the_same_bytes(
    whole: Path, tiny_bundle: Path, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    prompts, out = written(tmp_path, LINES), tmp_path / "out.jsonl"

    def interrupted(answers: Iterable[Future[Any]]) -> Iterator[Future[Any]]:
        for number, answered in enumerate(as_completed(answers)):
            if number == after:
                signal.raise_signal(signal.SIGINT)
            yield answered

    with monkeypatch.context() as patch:
        patch.setattr(distillations, "as_completed", interrupted)
        assert distill(tiny_bundle, prompts, out, "--max-requests", "2") == INTERRUPTED
    message = f"{partial_file(out)} has the answers so far: the same command continues the run"
    assert message in capfd.readouterr().err
    assert not out.exists()
    stored = len(records(partial_file(out)))
    assert after - 1 <= stored <= after  # one prompt has no answer
    with partial_file(out).open("ab") as file:
        file.write(b'{"line": 8, "messages": [{"role": "user", "con')  # as after a kill
    assert distill(tiny_bundle, prompts, out, "--max-requests", "2") == OK
    assert f"{stored}/{len(LINES)} prompts are answered" in capfd.readouterr().err
    assert out.read_bytes() == whole.read_bytes()
    assert [file.name for file in tmp_path.iterdir() if "out" in file.name] == ["out.jsonl"]


def test_answers_at_the_limit_do_not_end_and_end_their_conversation(
    tiny_bundle: Path, tmp_path: Path, capfd: Capture
) -> None:
    prompts, out = written(tmp_path, LINES), tmp_path / "out.jsonl"
    assert distill(tiny_bundle, prompts, out, "--max-tokens", "3", "--json") == OK
    found = records(out)
    assert [record["ends"] for record in found] == [False] * len(found)
    assert roles(found[1]) == ["user", "assistant"]
    assert [conversation.ends for conversation in read_conversations(out)] == [False] * len(found)
    report = json.loads(capfd.readouterr().out)
    assert (report["prompts"], report["conversations"], report["unfinished"], report["tokens"]) == (8, 7, 7, 21)


def test_mistakes_are_refused_before_anything_is_generated(tiny_bundle: Path, tmp_path: Path, capfd: Capture) -> None:
    prompts, out = written(tmp_path, LINES), tmp_path / "out.jsonl"
    out.write_text("mine", "utf-8")

    def refused(code: int, message: str, target: Path = out, *more: str) -> None:
        assert distill(tiny_bundle, prompts, target, *more) == code
        assert message in capfd.readouterr().err

    refused(INPUT, f"{out}: exists: replace it with --overwrite, or choose another output")
    refused(USAGE, f"{prompts}: is the prompt file: choose another output", prompts, "--overwrite")
    refused(
        USAGE, "--max-tokens is 0: expected a whole number of at least 1", tmp_path / "other.jsonl", "--max-tokens", "0"
    )
    assert out.read_text("utf-8") == "mine"
    assert not partial_file(out).exists()
    assert distill(tiny_bundle, prompts, out, "--overwrite", "--max-tokens", "2") == OK
    assert len(records(out)) == 7


def test_prompts_without_any_answer_or_others_than_before_are_an_error(
    whole: Path, tiny_bundle: Path, tmp_path: Path, capfd: Capture
) -> None:
    prompts, out = written(tmp_path, LINES[6:7]), tmp_path / "out.jsonl"
    assert distill(tiny_bundle, prompts, out) == INPUT
    assert f"{prompts}: no prompt has an answer" in capfd.readouterr().err
    assert not out.exists()
    written(tmp_path, LINES)
    for content in (
        '{"line": 1, "messages": [{"role": "user", "content": "Other."}]}',
        '{"line": 99, "messages": []}',
        "[]",
    ):
        partial_file(out).write_text(content + "\n")
        assert distill(tiny_bundle, prompts, out) == INPUT
        assert f"{partial_file(out)}: does not continue with {prompts}" in capfd.readouterr().err
    assert distill(tiny_bundle, prompts, out, "--overwrite") == OK
    assert out.read_bytes() == whole.read_bytes()


REFUSING = "{% for m in messages %}{{ raise_exception('no system') if m.role == 'system' }}{% endfor %}{{ messages[0].content }}"


@pytest.mark.parametrize("template", [None, REFUSING])
def test_turns_that_the_template_refuses_or_that_need_one_are_found_first(
    template: str | None, tiny_bundle: Path, tmp_path: Path, capfd: Capture
) -> None:
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    manifest = read_manifest(bundle)
    for name in (MANIFEST_FILE, TEMPLATE_FILE):
        (bundle / name).unlink()
    if template is not None:
        (bundle / TEMPLATE_FILE).write_text(template, "utf-8")
    write_manifest(bundle, manifest)
    prompts, out = written(tmp_path, LINES), tmp_path / "out.jsonl"
    assert distill(bundle, prompts, out) == INPUT
    message = "line 4: chat template: TemplateError: no system" if template else "line 2: has several turns, but"
    assert f"{prompts} {message}" in capfd.readouterr().err
    assert not out.exists()
    if template is None:  # single prompts are answered without one
        single = written(tmp_path, [{"prompt": TEXT}], "single.jsonl")
        assert distill(bundle, single, out, "--max-tokens", "5", "--overwrite") == OK
        with Runtime.open(bundle, threads=1) as opened:
            text = opened.generate(TEXT, Decoding(max_tokens=5)).text
        assert records(out)[0]["messages"][1]["content"] == text


def test_an_incomplete_character_at_the_limit_is_left_out(tmp_path: Path) -> None:
    first_bytes = (chr(0xE1 + index) for index in range(len(WORDS) - 7))  # of characters of three
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate([*"abcdefg", *first_bytes])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    (tmp_path / TOKENIZER_FILE).write_text(tokenizer.to_str(), "utf-8")
    prompts = [AnswerPrompt(line, ((Turn("user", "abcdefg"[line:] + "abc"),),)) for line in range(7)]
    with (
        hash_runtime(Language(3)) as whole,
        Runtime(Bundle(tmp_path, whole.bundle.manifest), whole.engine, 64) as runtime,
    ):
        options = DistillOptions(max_tokens=4)
        found = [distillations._answer(runtime, prompt, options)[0] for prompt in prompts]
        plain = [runtime.generate(prompt.parts[0][0].content, Decoding(max_tokens=4)) for prompt in prompts]
    cut = 0
    for record, completion in zip(found, plain, strict=True):
        finished = completion.ending == "end"
        expected = completion.text if finished else completion.text.rstrip("\ufffd")
        assert record is not None
        assert record["messages"][1]["content"] == expected
        assert record.get("ends", True) == finished
        cut += completion.text != expected
    assert cut


# The prompt file


def read(folder: Path, content: str | bytes, name: str = "prompts.jsonl") -> list[AnswerPrompt]:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_prompts(folder / name)


def chat(*roles: str, **others: Any) -> dict[str, Any]:
    turns = [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]
    return {"messages": turns, **others}


# Roles of the given turns -> indices of the turns of each part
PARTS = {
    ("system", "user"): [[0, 1]],
    ("user", "user", "user"): [[0], [1], [2]],
    ("user", "user", "assistant", "user", "user"): [[0], [1, 2, 3], [4]],
    ("user", "assistant", "user", "assistant"): [[0, 1, 2]],
    ("user", "assistant", "tool", "tool", "user"): [[0, 1, 2, 3], [4]],
}


@pytest.mark.parametrize("roles", PARTS, ids="-".join)
def test_each_turn_without_an_answer_ends_a_part(tmp_path: Path, roles: tuple[str, ...]) -> None:
    (found,) = read_prompts(written(tmp_path, [chat(*roles)]))
    expected = tuple(tuple(Turn(roles[n], f"{roles[n]} {n}") for n in part) for part in PARTS[roles])
    assert found.parts == expected


def test_other_keys_and_line_numbers_are_stored(tmp_path: Path) -> None:
    lines = [
        "",
        json.dumps(chat("user", kind="code", id=7, fork=False, ends=False)),
        '{"prompt": "Why?", "response": "No.", "id": 8}',
    ]
    found = read(tmp_path, "\n".join(lines))
    assert [one.line for one in found] == [2, 3]
    assert [one.others for one in found] == [{"kind": "code", "id": 7, "fork": False}, {"id": 8}]
    assert found[1].parts == ((Turn("user", "Why?"),),)


def test_a_text_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    found = read(tmp_path, '\ufeffWhy?\r\n\n  {"prompt": 1}\u2028more\n', "prompts.TXT")
    contents = [(one.line, one.parts[0][0].content, one.others) for one in found]
    assert contents == [(1, "Why?", {}), (3, '  {"prompt": 1}\u2028more', {})]


REFUSED = [
    ('{"text": "a"}', 'holds "text": expected "messages" or "prompt"'),
    ('{"prompt": "a", "messages": []}', 'holds "messages" and "prompt": expected "messages" or "prompt", not both'),
    ('{"prompt": " "}', '"prompt" is empty: expected text'),
    (json.dumps(chat("system")), "the last turn is of the system: expected a user turn last"),
    (json.dumps(chat("assistant")), "turn 1 is of the assistant: expected a turn before it"),
    ("Why?", "not JSON (Expecting value at column 1): expected one object on each line; plain text goes into"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_other_lines_are_refused_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(InputFault, match=re.escape(f"{tmp_path / 'prompts.jsonl'} line 2: {message}")):
        read(tmp_path, f"{json.dumps(chat('user'))}\n{line}\n")


def test_files_without_a_prompt_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFault, match="has no prompt: expected at least one line"):
        read(tmp_path, "\n\n")
    with pytest.raises(InputFault, match="no such file: expected a prompt file with one prompt per line"):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(InputFault, match=r"line 1: not UTF-8 text \(invalid start byte at byte 0\): save it as UTF-8"):
        read(tmp_path, b"\xff\n", "prompts.txt")
