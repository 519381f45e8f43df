"""Demo evaluation: which answers count as correct, and which steps are counted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.session import Runtime
from spaceport.tools.demo_recipe.corpus import collect
from spaceport.tools.demo_recipe.evaluate import (
    NOTE,
    Evaluation,
    QuestionAnswers,
    answer_question,
    chosen,
    cost_of,
    evaluate,
    main,
    quality_of,
    show,
)
from spaceport.tools.demo_recipe.parameter_answers import answer, question, verify
from spaceport.tools.demo_recipe.scratch import write_scratch
from spaceport.tools.demo_recipe.signatures import functions_in
from spaceport.tools.demo_recipe.sources import read_source, stdlib_paths
from spaceport.tools.demo_recipe.tokenizer import train_tokenizer
from spaceport.tools.reference import checkpoint_runtime
from spaceport.tools.verify.acceptance.answers import Answer, AnswerThread
from support.paths import TINY

pytestmark = pytest.mark.on_change()

FORK, CHILD, END = 90, 91, 92
LIST, SENTENCE = functions_in("def f(a, b, c): ...\ndef g(a): ...\n")


def line(tokens: tuple[int, ...], fork: int | None = None) -> AnswerThread:
    return AnswerThread((1, 2), (*tokens, END), fork, "end")


def in_one_line(tokens: tuple[int, ...], steps: int) -> Answer:
    return Answer((line(tokens),), Statistics(steps=steps))


def forked(children: int, steps: int) -> Answer:
    """A root thread of seven tokens with forks at indices 1, 3 and 5."""
    root = line((10, FORK, 11, FORK, 12, FORK, 13))
    details = [line((20, 21, 22, 23, 24), 2 * child + 1) for child in range(children)]
    return Answer((root, *details), Statistics(steps=steps))


def written(children: int = 3, text: str | None = None, drafted: bool = False) -> QuestionAnswers:
    """Forked, sequential and unforked answers; with drafts, two tokens per step."""
    right = answer(LIST)
    together, sequential = forked(children, 6 if drafted else 12), forked(children, 13 if drafted else 26)
    whole = in_one_line((10, 20, 11), 2 if drafted else 4)
    return QuestionAnswers(LIST, together, sequential, whole, verify(LIST, text or right), verify(LIST, right))


def likely_forks(model: Any, tokenizer: Any) -> None:
    """Makes [Fork] the first generated token."""
    asked = [{"role": "user", "content": question(LIST)}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False).ids])
    rows = model.model.embed_tokens.weight
    with torch.no_grad():
        rows[tokenizer.convert_tokens_to_ids("[Fork]")] = 2 * rows[model(ids).logits[0, -1].argmax()]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model with the special tokens of a tuned one, whose answers begin with a fork."""
    folder = tmp_path_factory.mktemp("untrained")
    sources = [read_source(path) for path in stdlib_paths() if path.as_posix().endswith(("/shlex.py", "/weakref.py"))]
    write_scratch(folder, train_tokenizer(collect(sources, lists=0).vocabulary))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    tokenizer.add_tokens(["[M]", "[Fork]", "[Child]"], special_tokens=True)
    likely_forks(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sar = {"mask_tokens": ["[M]"], "mask_slots": 3, "fork_token": "[Fork]", "child_token": "[Child]"}
    (folder / "sar_config.json").write_text(json.dumps(sar), "utf-8")
    return folder


@pytest.fixture(scope="module")
def runtime(checkpoint: Path) -> Iterator[Runtime]:
    """A runtime with a short context and many threads: the model forks constantly."""
    with checkpoint_runtime(open_checkpoint(checkpoint, TokenFlags(), False), 512, 1) as opened:
        yield Runtime(opened.bundle, opened.engine, 48)


@pytest.fixture(scope="module")
def found(runtime: Runtime) -> tuple[Evaluation, list[str]]:
    """Its evaluation, and the announced stages."""
    stages: list[str] = []
    return evaluate(runtime, [LIST, SENTENCE], ["import os\nimport sys\n" * 3], stages.append), stages


def test_quality_counts_exact_answers_and_fork_counts() -> None:
    wrong = answer(LIST).replace("2. b: It is", "2. b: It was")
    found = quality_of([written(), written(2), written(text=wrong)])
    assert (found.questions, found.forks_correct, found.items, found.items_correct) == (3, 2, 9, 8)
    assert (found.exact, found.exact_unforked) == (2, 3)


def test_drafting_cost_sums_the_steps_of_each_decoding_mode() -> None:
    chats = {0: [written(), written()], 1: [written(drafted=True)] * 2}
    sources = {0: [in_one_line((30, 31, 32), 4)], 1: [in_one_line((30, 31, 32), 2)]}
    plain, drafted = (cost_of(slots, chats, sources) for slots in (0, 1))
    assert (plain.parallel_steps, drafted.parallel_steps) == (2 * 12, 2 * 6)
    assert plain.plain_steps == drafted.plain_steps == 2 * (4 + 3 * 5 + 1)  # root, three details, the end
    assert (plain.sequential_steps, drafted.sequential_steps) == (2 * 26, 2 * 13)
    assert plain.sequential_tokens == drafted.sequential_tokens == 2 * (8 + 3 * 6)
    assert (drafted.chat_tokens, drafted.chat_steps, drafted.source_tokens, drafted.source_steps) == (8, 4, 4, 2)
    values = drafted.as_dict()
    assert [values[f"{kind}_tokens_per_step"] for kind in ("chat", "source", "thread")] == [2, 2, 2]
    assert values["fewer_steps"] == 20 / 6


def test_an_output_changed_by_drafts_is_counted() -> None:
    chats = {0: [written()], 1: [written(children=2, drafted=True)]}
    sources = {0: [in_one_line((30,), 2)], 1: [in_one_line((31,), 1)]}
    assert cost_of(0, chats, sources).changed == 0
    assert cost_of(1, chats, sources).changed == 2


def test_a_question_is_answered_with_and_without_forks(runtime: Runtime) -> None:
    fork = runtime.bundle.manifest.tokens.fork
    answered = answer_question(runtime, LIST, 0)
    assert answered.forked.root.tokens[0] == fork
    assert answered.forked.children
    assert answered.sequential.threads == answered.forked.threads
    assert answered.sequential.statistics.steps > answered.forked.statistics.steps
    assert not answered.unforked.children
    assert answered.unforked.root.tokens
    assert fork not in answered.unforked.root.tokens


def test_an_untrained_model_is_incorrect_and_drafts_change_no_output(
    found: tuple[Evaluation, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation, stages = found
    assert len(stages) == 4
    assert (evaluation.lists.questions, evaluation.sentences.questions) == (1, 1)
    assert evaluation.lists.exact == evaluation.sentences.exact == 0
    assert [(cost.mask_slots, cost.changed) for cost in evaluation.costs] == [(0, 0), (1, 0), (3, 0)]
    plain = evaluation.costs[0]
    assert plain.chat_tokens == plain.chat_steps > 0
    assert plain.source_tokens == plain.source_steps > 0
    show(evaluation, 1)
    out = capsys.readouterr().out
    assert NOTE in out
    assert "Explain the parameters of f( a, b, c )\n  0 items, expected 3" in out
    assert json.loads(json.dumps(evaluation.as_dict()))["note"] == NOTE


def test_the_question_limit_applies_to_each_kind() -> None:
    assert chosen([LIST, SENTENCE, LIST, SENTENCE, SENTENCE], 2) == [LIST, LIST, SENTENCE, SENTENCE]


def test_an_error_names_what_was_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(TINY, tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    for arguments, code, message in (
        (["model", "--questions", "0"], 2, "--questions is 0: expected at least 1"),
        (["nowhere"], 3, "nowhere: expected a checkpoint"),
        (["tiny"], 3, "tiny: has no fork token: expected the demo model, which forks"),
    ):
        monkeypatch.setattr("sys.argv", ["evaluate", *arguments])
        assert main() == code
        assert message in capsys.readouterr().err
