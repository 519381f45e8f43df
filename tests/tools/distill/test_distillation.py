"""Distillation: prompts become the model's own answers, in order, resumable, as data that training reads."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.bundle_files import write_manifest
from spaceport.graphs.contract.manifest import MANIFEST_FILE, TEMPLATE_FILE
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, INTERRUPTED, OK, USAGE
from spaceport.tools.distill import distillation as distillations
from spaceport.tools.distill.distillation import DistillOptions, DistillProgress, open_distillation, requests_for
from spaceport.tools.distill.partial_answers import partial_file
from spaceport.tools.tune.conversations import read_conversations
from spaceport.tools.tune.own_answers import stored_answers
from support.paths import TINY
from support.small_bundle import ENGINE, RECORD

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


OPTIONS = DistillOptions(60, 2, 256, threads=1)  # those of LIMITS


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
    assert runtime.bundle.manifest.max_mask_slots > 0
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


@pytest.mark.parametrize("after", [0, 1, 6])
def test_several_requests_also_of_an_interrupted_run_write_the_same_bytes(
    whole: Path, tiny_bundle: Path, tmp_path: Path, after: int
) -> None:
    prompts, out = written(tmp_path, LINES), tmp_path / "out.jsonl"
    seen: list[DistillProgress] = []

    def interrupt(progress: DistillProgress) -> None:
        seen.append(progress)
        if len(seen) > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_distillation(tiny_bundle, prompts, out, OPTIONS) as distillation:
        distillation.run(interrupt)
    assert not out.exists()
    stored = stored_answers(partial_file(out))
    assert len(stored) >= after
    with partial_file(out).open("ab") as file:
        file.write(b'{"line": 8, "outcome": "finished", "text": "torn')  # as after a kill
    with open_distillation(tiny_bundle, prompts, out, OPTIONS) as distillation:
        report = distillation.run(seen.append)
    assert out.read_bytes() == whole.read_bytes()
    assert report.progress.tokens == report.tokens - sum(answer.tokens for answer in stored)
    assert seen[-1].done == seen[-1].total == report.prompts == len(LINES)


def test_stored_answers_are_not_generated_again(tiny_bundle: Path, tmp_path: Path) -> None:
    prompts, out = written(tmp_path, LINES[:3]), tmp_path / "out.jsonl"
    with open_distillation(tiny_bundle, prompts, out, OPTIONS) as distillation:
        with distillation.partial.open("a") as file:
            for part, text in enumerate(("Stored.", "Stored too.")):
                answer = {"line": 2, "outcome": "finished", "text": text, "tokens": 5, "part": part}
                file.write(json.dumps(answer) + "\n")
        report = distillation.run()
    assert [turn["content"] for turn in records(out)[1]["messages"][1::2]] == ["Stored.", "Stored too."]
    assert report.progress.stored == 1


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
    assert report["answers"] == {"finished": 0, "unfinished": 7, "empty": 0, "long prompt": 1}
    assert (report["prompts"], report["lines"], report["tokens"]) == (8, 7, 21)
    assert report["progress"]["done"] == 8


def test_a_later_turn_that_is_too_long_ends_the_conversation(tiny_bundle: Path, tmp_path: Path, capfd: Capture) -> None:
    turns = [asked("scanner"), {"role": "user", "content": "long " * 260}, asked("tool")]
    prompts, out = written(tmp_path, [{"messages": turns}]), tmp_path / "out.jsonl"
    assert distill(tiny_bundle, prompts, out) == OK
    (record,) = records(out)
    assert (roles(record), "ends" in record) == (["user", "assistant"], False)
    shown = capfd.readouterr().out
    assert re.search(r"dropped: prompt too long +1\n", shown)
    assert f"{out}: 1 of 1 prompts" in shown


def test_a_text_file_is_answered_into_the_file_that_a_link_names(tiny_bundle: Path, tmp_path: Path) -> None:
    prompts, target, link = tmp_path / "prompts.txt", tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    prompts.write_text("".join(f"{asked(name)['content']}\n" for name in KNOWN), "utf-8")
    target.write_text("old", "utf-8")
    link.symlink_to(target)
    assert distill(tiny_bundle, prompts, link, "--overwrite", "--max-tokens", "3") == OK
    assert link.is_symlink()
    assert [record["messages"][0] for record in records(target)] == [asked(name) for name in KNOWN]


def test_mistakes_are_refused_before_anything_is_generated(tiny_bundle: Path, tmp_path: Path, capfd: Capture) -> None:
    prompts, out = written(tmp_path, LINES), tmp_path / "out.jsonl"
    out.write_text("mine", "utf-8")

    def refused(code: int, message: str, target: Path = out, *more: str) -> None:
        assert distill(tiny_bundle, prompts, target, *more) == code
        assert message in capfd.readouterr().err

    refused(INPUT, f"{out}: exists: replace it with --overwrite, or choose another output")
    refused(INPUT, "does not exist: create it first", tmp_path / "nowhere" / "out.jsonl")
    refused(INPUT, "is not a file: expected the name of a new file", tmp_path)
    refused(USAGE, f"{prompts}: is the prompt file: choose another output", prompts, "--overwrite")
    refused(USAGE, "--max-tokens is 0: expected at least 1", tmp_path / "other.jsonl", "--max-tokens", "0")
    refused(USAGE, "--max-requests is 0: expected 1 to 1024", tmp_path / "other.jsonl", "--max-requests", "0")
    refused(USAGE, "--max-seq-len is 1: expected 2 to", tmp_path / "other.jsonl", "--max-seq-len", "1")
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
    assert distill(tiny_bundle, prompts, out) == INPUT
    assert "was begun with the prompts" in capfd.readouterr().err
    assert distill(tiny_bundle, prompts, out, "--overwrite") == OK
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ raise_exception('no system') if m.role == 'system' }}{% endfor %}{{ messages[0].content }}",
    ],
)
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
    assert stored_answers(partial_file(out)) == []
    if template is None:  # single prompts are answered without one
        single = written(tmp_path, [{"prompt": TEXT}], "single.jsonl")
        assert distill(bundle, single, out, "--max-tokens", "5", "--overwrite") == OK
        with Runtime.open(bundle, threads=1) as opened:
            text = opened.generate(TEXT, Decoding(max_tokens=5)).text
        assert records(out)[0]["messages"][1]["content"] == text


def test_engines_limit_the_requests_and_leave_the_digest_as_it_is(tiny_bundle: Path) -> None:
    manifest = read_manifest(tiny_bundle)
    assert distillations._digest_of(replace(manifest, engines={ENGINE: RECORD})) == distillations._digest_of(manifest)
    assert distillations._digest_of(replace(manifest, max_mask_slots=1)) != distillations._digest_of(manifest)
    assert requests_for(manifest) == 16
    for takes, expected in ((4, 4), (64, 16)):
        assert requests_for(replace(manifest, engines={ENGINE: replace(RECORD, requests=takes)})) == expected


def test_an_interrupted_command_says_how_to_continue(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    @contextmanager
    def interrupting() -> Iterator[Callable[[DistillProgress], None]]:
        yield lambda progress: signal.raise_signal(signal.SIGINT) if progress.done == 3 else None

    prompts, out = written(tmp_path, LINES), tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr("spaceport.tools.cli.distill.progress_shown", interrupting)
        assert distill(tiny_bundle, prompts, out, "--max-requests", "2") == INTERRUPTED
    message = f"{partial_file(out)} has the answers so far: the same command continues the run"
    assert message in capfd.readouterr().err
    assert len(stored_answers(partial_file(out))) >= 3
    assert not out.exists()
