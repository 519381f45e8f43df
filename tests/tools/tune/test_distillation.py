"""Distillation: a model learns its own answers, whatever writes them, and an interrupted one is gone on with."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import TOKENIZER_FILE
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, OK
from spaceport.tools.tune.conversations import Conversation, Turn, read_conversations
from spaceport.tools.tune.distill import LONG, UNFINISHED, WRITTEN, Distillation, distill, writer
from support.paths import TINY

KNOWN = ("scanner", "encoder", "tool")  # the tiny model answers with the first lines of these files
CUTOFF = 160


def asked(line: int, content: str, *more: Turn) -> Conversation:
    return Conversation(line, (Turn("user", content), *more, Turn("assistant", "Not this.")))


CONVERSATIONS = [
    *(asked(line, f"How does json/{name}.py begin?") for line, name in enumerate(KNOWN, 1)),
    Conversation(4, (Turn("text", "import json"),)),
    asked(5, "How does json/scanner.py begin? " * 12),
]


@pytest.fixture(scope="module")
def torch_writer() -> Iterator[Runtime]:
    with writer(TINY, Distillation(None), CUTOFF, False) as runtime:
        yield runtime


def test_answers_are_the_models_own_whatever_writes_them(
    torch_writer: Runtime, tiny_bundle: Path, tmp_path: Path
) -> None:
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    found = distill(CONVERSATIONS, torch_writer, tmp_path / "torch.jsonl", CUTOFF, counts[0])
    with writer(TINY, Distillation(tiny_bundle), CUTOFF, False) as runtime:
        other = distill(CONVERSATIONS, runtime, tmp_path / "bundle.jsonl", CUTOFF, counts[1])
    assert found == other
    assert counts[0] == counts[1] == {WRITTEN: 3, LONG: 1}
    assert [conversation.line for conversation in found] == [1, 2, 3, 4]
    assert found[3] == CONVERSATIONS[3]
    messages: Any = [{"role": "user", "content": "How does json/tool.py begin?"}]
    assert found[2].answer == torch_writer.generate(messages, Decoding(max_tokens=100)).text
    assert found[2].answer not in (None, "Not this.")
    assert (tmp_path / "torch.jsonl").read_bytes() == (tmp_path / "bundle.jsonl").read_bytes()


def test_answers_without_an_end_are_dropped_and_counted(torch_writer: Runtime, tmp_path: Path) -> None:
    prompt = len(torch_writer.tokens_of([{"role": "user", "content": "How does json/tool.py begin?"}]))
    counts: Counter[str] = Counter()
    found = distill([CONVERSATIONS[2]], torch_writer, tmp_path / "answers.jsonl", prompt + 5, counts)
    assert (found, counts) == ([], {UNFINISHED: 1})


def test_answers_that_are_there_are_not_written_again(torch_writer: Runtime, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    whole = distill(CONVERSATIONS, torch_writer, file, CUTOFF, Counter())
    lines = file.read_text("utf-8").splitlines(keepends=True)
    told = json.loads(lines[0])
    file.write_text(json.dumps({**told, "text": "kept"}) + "\n" + lines[1][: len(lines[1]) // 2], "utf-8")
    again = distill(CONVERSATIONS, torch_writer, file, CUTOFF, Counter())
    assert again[0].answer == "kept"
    assert again[1:] == whole[1:]
    before = file.read_bytes()
    assert distill(CONVERSATIONS, torch_writer, file, CUTOFF, Counter()) == again
    assert file.read_bytes() == before


def test_a_bundle_of_another_tokenizer_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    foreign = shutil.copytree(TINY, tmp_path / "checkpoint")
    told = json.loads((foreign / "tokenizer.json").read_text("utf-8"))
    told["model"]["merges"].pop()
    (foreign / "tokenizer.json").write_text(json.dumps(told), "utf-8")
    with (
        pytest.raises(InputFault, match=r"has another tokenizer than .*: expected the bundle of this checkpoint"),
        writer(foreign, Distillation(tiny_bundle), CUTOFF, False),
    ):
        pass
    assert TOKENIZER_FILE in {file.name for file in tiny_bundle.iterdir()}


def test_a_model_is_tuned_on_its_own_answers(
    tiny_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    lines = [{"prompt": f"How does json/{name}.py begin?", "response": "Not this."} for name in KNOWN]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    assert [conversation.answer for conversation in read_conversations(data)] == ["Not this."] * 3
    order = [
        "tune",
        str(TINY),
        str(tmp_path / "tuned"),
        str(data),
        "--self-distill",
        "--json",
        "--max-steps",
        "1",
        "--cutoff",
        str(CUTOFF),
    ]
    assert run([*order, "--bundle", str(tmp_path / "nowhere")]) == INPUT
    assert run([*order, "--bundle", str(tiny_bundle)]) == OK
    output, errors = capfd.readouterr()
    found = json.loads(output)
    assert found["samples"] == {"unforked": 3, WRITTEN: 3}
    assert found["training"]["losses"][0] < 0.5  # it knows them
    assert "writing the model's own answers" in errors
    assert not (tmp_path / "tuned.training").exists()
    assert run([*order[:2], str(tmp_path / "other"), str(data), "--bundle", str(tiny_bundle)]) == 2
    assert "--bundle has no effect without --self-distill" in capfd.readouterr().err
