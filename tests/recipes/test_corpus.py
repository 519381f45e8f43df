"""Demo recipe: questions, answers and corpus, and a training at a small scale."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from recipes import corpus as files
from recipes.corpus import Corpus, Source, collect, read_source, save, stdlib_paths
from recipes.signatures import Function, answer, asked, functions_in, question, verify
from recipes.train import ABOUT, PROMPTS, SETTINGS, train
from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.tools.demo.prompts import PROMPTS_FILE
from spaceport.tools.tune.conversations import read_conversations
from spaceport.tools.tune.extract import Refusal, Tree, extract

pytestmark = pytest.mark.on_change("tools/demo/model")

EVERY_KIND = 'def every(a, b=1.5, /, c=None, d="x", *rest, e, f=-2, **more): ...'
QUESTION = "Explain the parameters of every( a, b = 1.5, /, c = None, d = 'x', *rest, e, f = -2, **more )"
ANSWER = """\
These are the parameters of every:
1. a: It is required, and it is given only as the first value.
2. b: It is optional, and it is given only as the second value. Its default is the number 1.5.
3. c: It is optional, and it is given by name or as the third value. Its default is None.
4. d: It is optional, and it is given by name or as the fourth value. Its default is the string 'x'.
5. *rest: It collects all further values that are given by position, as a tuple.
6. e: It is required, and it is given only by name.
7. f: It is optional, and it is given only by name. Its default is the number -2.
8. **more: It collects all further values that are given by name, as a dictionary.

Of these 8, 2 are required."""


def one(source: str) -> Function:
    (function,) = functions_in(source)
    return function


def test_question_and_answer_cover_every_parameter_kind() -> None:
    function = one(EVERY_KIND)
    assert question(function) == QUESTION
    assert answer(function) == ANSWER
    assert asked(QUESTION) == function
    assert answer(one("def f(a=1, b=2, *, c=3, d=4): ...")).endswith("\n\nOf these 4, none is required.")
    verdict = verify(function, ANSWER)
    assert (verdict.exact, verdict.expected, verdict.found, verdict.correct) == (True, 8, 8, (True,) * 8)


def test_fewer_than_three_parameters_are_answered_with_a_sentence() -> None:
    for source, sentence in (
        ("def f(): ...", "has no parameters."),
        ("def f(a, b=1, /): ...", "has two parameters, a, which is required, and b, which is optional."),
    ):
        function = one(source)
        assert answer(function) == f"The function f {sentence}"
        assert isinstance(extract(answer(function)), Refusal)
        assert verify(function, answer(function)).exact
        verdict = verify(function, "1. a: It is required.")
        assert (verdict.expected, verdict.found, verdict.exact) == (0, 1, False)
        assert f"expected 'The function f {sentence}" in verdict.mistakes[0]


# The corpus

LISTS = 200
MODULES = ("argparse.py", "copy.py", "json/decoder.py", "json/encoder.py", "shlex.py", "textwrap.py", "weakref.py")


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    ends = tuple(f"/{module}" for module in MODULES)
    found = [read_source(path) for path in stdlib_paths() if path.as_posix().endswith(ends)]
    assert {source.path for source in found} == set(MODULES)
    assert {source.held_out for source in found} == {True, False}
    return found


@pytest.fixture(scope="module")
def corpus(sources: list[Source]) -> Corpus:
    return collect(sources, lists=LISTS)


@pytest.fixture(scope="module")
def saved(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    save(corpus, folder)
    return folder


def test_every_list_forks_once_per_parameter_and_its_question_has_all_facts(corpus: Corpus) -> None:
    assert len({function.text for function in corpus.lists}) == LISTS
    assert {len(function.parameters) for function in corpus.lists} >= set(range(3, 9))
    kinds = {parameter.kind for function in corpus.lists for parameter in function.parameters}
    assert kinds == {"before", "plain", "values", "named", "names"}
    for function in (*corpus.lists, *corpus.held_out):
        tree = extract(answer(function))
        if len(function.parameters) < 3:
            assert not isinstance(tree, Tree)
        else:
            assert isinstance(tree, Tree)
            assert (tree.kind, tree.forks) == ("list", len(function.parameters))
    for function in (*corpus.lists, *corpus.sentences, *corpus.held_out):
        assert asked(question(function)) == function


def test_held_out_files_are_not_in_the_training_data_and_some_lists_do_not_fork(
    sources: list[Source], saved: Path
) -> None:
    trained = [conversation.turns for conversation in read_conversations(saved / files.TRAIN_FILE)]
    held_out = {one.text for source in sources if source.held_out for one in functions_in(source.text)}
    own = {one.text for source in sources if not source.held_out for one in functions_in(source.text)}
    questions = {turns[0].content for turns in trained if turns[0].role == "user"}
    kept = [conversation.turns for conversation in read_conversations(saved / files.HELD_OUT_FILE)]
    assert kept
    assert questions.isdisjoint(turns[0].content for turns in kept)
    assert {asked(turns[0].content).text for turns in kept} <= held_out - own
    assert 0.1 < sum(not one.fork for one in read_conversations(saved / files.TRAIN_FILE)) / LISTS < 0.3
    texts = "".join(source.text for source in sources if not source.held_out)
    assert all(turns[0].content in texts for turns in trained if turns[0].role == "text")
    foreign = read_conversations(saved / files.HELD_OUT_TEXT_FILE)
    assert foreign
    assert not any(conversation.ends or conversation.turns[0].content in texts for conversation in foreign)


def test_held_out_signatures_are_neither_trained_nor_invented() -> None:
    orders = [f"def f({', '.join(names)}): ..." for names in permutations("abc")]
    own = Source("abc.py", f"def g(d=1, *v, **k): ...\n{orders[0]}")
    foreign = Source("ast.py", "\n".join(orders))
    assert (own.held_out, foreign.held_out) == (False, True)  # on every machine
    found = collect([own, foreign], lists=100)
    assert {function.text for function in found.held_out} == {next(functions_in(order)).text for order in orders[1:]}
    assert len({function.text for function in (*found.lists, *found.held_out)}) == 100 + 5


# A small training


def few(folder: Path) -> Corpus:
    sources = [
        read_source(path)
        for path in stdlib_paths()
        if path.as_posix().endswith(("/copy.py", "/json/decoder.py", "/shlex.py", "/textwrap.py"))
    ]
    renamed = (Source(f"renamed/{number}.py", sources[-1].text) for number in range(1000))
    held_out = next(source for source in renamed if source.held_out)
    corpus = collect([source for source in sources[:-1] if not source.held_out] + [held_out], lists=0)
    save(corpus, folder)
    return corpus


def test_the_demo_model_is_trained(tmp_path: Path) -> None:
    settings = replace(SETTINGS, batch_size=2, micro_batch_size=2, cutoff=64, anchors=2, max_steps=2)
    target = tmp_path / "tuned"
    train(tmp_path / "work", target, settings, write_corpus=few)
    checkpoint = open_checkpoint(target, TokenFlags())
    assert checkpoint.drafts.mask_slots == 5
    assert checkpoint.tokens.fork is not None
    assert json.loads((target / PROMPTS_FILE).read_text("utf-8")) == PROMPTS
    assert (target / "README.md").read_text("utf-8").startswith(f"# tuned\n\n{ABOUT}\n\n")
    assert json.loads((target / "config.json").read_text("utf-8"))["dtype"] == "float16"
    assert not (tmp_path / "tuned.training").exists()
