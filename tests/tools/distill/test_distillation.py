"""Distillation: prompts and training data get the model's own answers, in order, resumable, as data that training reads."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from spaceport.exporter.bundle_manifest import write_manifest
from spaceport.graphs.contract.draft_methods import DraftMethod
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE, TEMPLATE_FILE, TOKENIZER_FILE
from spaceport.runtime.bundle import Bundle, read_manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools import distill as distillations
from spaceport.tools.cli import INPUT, INTERRUPTED, OK, USAGE, run
from spaceport.tools.distill import DistillOptions, DistillProgress, open_distillation, partial_file, requests_for
from spaceport.tools.tune import own_answers
from spaceport.tools.tune.conversations import Conversation, Turn, read_conversations
from spaceport.tools.tune.own_answers import (
    LONG,
    UNFINISHED,
    WRITTEN,
    AnswerLimits,
    AnswerPrompt,
    OwnAnswer,
    generate_answers,
    stored_answers,
)
from spaceport.tools.tune.own_answers import distill as self_distilled
from spaceport.tools.tune.tunable_model import open_generator
from support.hash_engine import Language
from support.hash_runtime import WORDS, hash_runtime
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


OPTIONS = DistillOptions(60, max_requests=2, max_seq_len=256, threads=1)  # those of LIMITS


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
    with pytest.raises(OptionFault, match="--temperature is -1: expected 0 to 100"):
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


def test_mistakes_are_refused_before_anything_is_generated(tiny_bundle: Path, tmp_path: Path, capfd: Capture) -> None:
    prompts, out = written(tmp_path, LINES), tmp_path / "out.jsonl"
    out.write_text("mine", "utf-8")

    def refused(code: int, message: str, target: Path = out, *more: str) -> None:
        assert distill(tiny_bundle, prompts, target, *more) == code
        assert message in capfd.readouterr().err

    refused(INPUT, f"{out}: exists: replace it with --overwrite, or choose another output")
    refused(USAGE, f"{prompts}: is the prompt file: choose another output", prompts, "--overwrite")
    refused(USAGE, "--max-tokens is 0: expected at least 1", tmp_path / "other.jsonl", "--max-tokens", "0")
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
    assert distillations._digest_of(replace(manifest, drafts=DraftMethod(max_tokens=1))) != distillations._digest_of(
        manifest
    )
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


CUTOFF = 160


def conversation(line: int, content: str, *more: Turn) -> Conversation:
    return Conversation(line, (Turn("user", content), *more, Turn("assistant", "Not this.")))


CONVERSATIONS = [
    *(conversation(line, f"How does json/{name}.py begin?") for line, name in enumerate(KNOWN, 1)),
    Conversation(4, (Turn("text", "import json"),)),
    conversation(5, "How does json/scanner.py begin? " * 12),
]


@pytest.fixture(scope="module")
def torch_generator() -> Iterator[Runtime]:
    with open_generator(TINY, None, CUTOFF, False) as runtime:
        yield runtime


def test_checkpoint_and_bundle_generate_the_same_answers(
    torch_generator: Runtime, tiny_bundle: Path, tmp_path: Path
) -> None:
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    found = self_distilled(CONVERSATIONS, torch_generator, tmp_path / "torch.jsonl", CUTOFF, counts[0])
    with open_generator(TINY, tiny_bundle, CUTOFF, False) as runtime:
        other = self_distilled(CONVERSATIONS, runtime, tmp_path / "bundle.jsonl", CUTOFF, counts[1], requests=8)
    assert found == other
    assert counts[0] == counts[1] == {WRITTEN: 3, LONG: 1}
    assert [each.line for each in found] == [1, 2, 3, 4]
    assert found[3] == CONVERSATIONS[3]
    messages: Any = [{"role": "user", "content": "How does json/tool.py begin?"}]
    assert found[2].answer == torch_generator.generate(messages, Decoding(max_tokens=100)).text
    assert found[2].answer not in (None, "Not this.")
    stored = [stored_answers(tmp_path / f"{name}.jsonl") for name in ("torch", "bundle")]
    assert stored[0] == sorted(stored[1], key=lambda answer: answer.line)


def test_a_finished_answer_sees_the_turns_before_it_and_ends_also_where_the_given_one_does_not(
    torch_generator: Runtime, tmp_path: Path
) -> None:
    turns = (*CONVERSATIONS[0].turns, Turn("user", "And"), *CONVERSATIONS[1].turns)
    given = Conversation(1, turns, ends=False, fork=False)
    (found,) = self_distilled([given], torch_generator, tmp_path / "answers.jsonl", CUTOFF, Counter())
    assert (found.ends, found.fork) == (True, False)
    assert found.turns[:-1] == turns[:-1]
    assert found.answer != "Not this."
    prompt, counts = len(torch_generator.tokens_of([{"role": "user", "content": turns[0].content}])), Counter[str]()
    unfinished = self_distilled([CONVERSATIONS[0]], torch_generator, tmp_path / "short.jsonl", prompt + 5, counts)
    assert (unfinished, counts) == ([], {UNFINISHED: 1})  # dropped


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
        dialogues = own_answers.open_dialogues(prompts, tmp_path / "answers.jsonl")
        generate_answers(dialogues, runtime, tmp_path / "answers.jsonl", AnswerLimits(64, 4))
        plain = [runtime.generate(prompt.parts[0][0].content, Decoding(max_tokens=4)) for prompt in prompts]
    cut = 0
    for dialogue, completion in zip(dialogues, plain, strict=True):
        (answer,) = dialogue.answers
        expected = completion.text if completion.ending == "end" else completion.text.rstrip("\ufffd")
        assert answer.text == expected
        cut += answer.outcome == "unfinished" and completion.text != expected
    assert cut


STORED = {"line": 3, "outcome": "finished", "text": "Yes.", "tokens": 2, "part": 1}
NO_ANSWERS: list[Any] = [
    *([], None, 3, "text", {}, {"line": 3}, {"outcome": "finished"}),
    *({**STORED, name: value} for name in ("line", "tokens", "part") for value in (None, "1", 1.5, True, -1, [])),
    *({**STORED, "outcome": value} for value in (None, 3, [], {}, "done")),
    *({**STORED, "text": value} for value in (None, 3, [], " ", "\ud800")),
]


def test_lines_that_are_no_answers_are_skipped_and_answers_may_contain_any_line_end(tmp_path: Path) -> None:
    file, text = tmp_path / "answers.jsonl", "a\u20285\u2028b\x85c"
    lines = [*(json.dumps(line).encode() for line in NO_ANSWERS), b"\xff", b"[" * 100_000, b'{"line": 1', b"9" * 5000]
    good = [STORED, {"line": 4, "outcome": "empty", "later": 3}, {"line": 5, "outcome": "finished", "text": text}]
    lines += [json.dumps(answer, ensure_ascii=False).encode() for answer in good]  # one has keys of other versions
    file.write_bytes(b"\n".join([*lines, b'{"line": 2, "text": "\xe2\x80']))
    expected = [OwnAnswer(3, "finished", "Yes.", 2, 1), OwnAnswer(4, "empty"), OwnAnswer(5, "finished", text)]
    assert stored_answers(file) == expected


def test_a_damaged_answer_is_generated_again(runtime: Runtime, tmp_path: Path) -> None:
    file, prompts = tmp_path / "answers.jsonl", [AnswerPrompt(line, ((Turn("user", TEXT),),)) for line in range(3)]
    generate_answers(own_answers.open_dialogues(prompts, file), runtime, file, AnswerLimits(256, 12))
    lines, answers = file.read_bytes().splitlines(keepends=True), stored_answers(file)
    dice = random.Random(5)
    for _ in range(100):
        damaged = bytearray(lines[1])
        damaged[dice.randrange(len(damaged) - 1)] ^= 1 << dice.randrange(7)
        file.write_bytes(lines[0] + damaged + lines[2])
        assert [answer for answer in stored_answers(file) if answer not in answers] == []
    generate_answers(own_answers.open_dialogues(prompts, file), runtime, file, AnswerLimits(256, 12))
    assert set(stored_answers(file)) == set(answers)


def test_a_bundle_with_another_tokenizer_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    foreign = shutil.copytree(TINY, tmp_path / "checkpoint")
    tokenizer = json.loads((foreign / "tokenizer.json").read_text("utf-8"))
    tokenizer["model"]["merges"].pop()
    (foreign / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    generator = open_generator(foreign, tiny_bundle, CUTOFF, False)
    with pytest.raises(InputFault, match=r"has another tokenizer than .*: expected the bundle of this"), generator:
        pass


def test_a_model_is_tuned_on_its_own_answers(
    tiny_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    lines = [{"prompt": f"How does json/{name}.py begin?", "response": "Not this."} for name in KNOWN]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    options = ["--self-distill", "--json", "--max-steps", "1", "--cutoff", str(CUTOFF)]
    order = ["tune", str(TINY), str(tmp_path / "tuned"), str(data), *options]
    assert run([*order, "--bundle", str(tmp_path / "nowhere")]) == INPUT
    assert run([*order, "--bundle", str(tiny_bundle)]) == OK
    output, errors = capfd.readouterr()
    found = json.loads(output)
    assert found["samples"] == {"unforked": 3, WRITTEN: 3}
    assert found["training"]["losses"][0] < 0.5  # it knows them
    assert "generating the model's own answers" in errors
    assert not (tmp_path / "tuned.training").exists()
