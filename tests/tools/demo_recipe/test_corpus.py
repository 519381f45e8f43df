"""Demo corpus: every list forks, held-out files are not trained on, and the untrained model has the right shape."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spaceport.tools.demo_recipe import corpus as files
from spaceport.tools.demo_recipe.corpus import WINDOW, Corpus, collect, save, windows
from spaceport.tools.demo_recipe.invented_signatures import invent, pool_of
from spaceport.tools.demo_recipe.packages import installed
from spaceport.tools.demo_recipe.parameter_answers import answer, asked, question
from spaceport.tools.demo_recipe.scratch import FREE_ROWS, write_scratch
from spaceport.tools.demo_recipe.signatures import functions_in, read_signature
from spaceport.tools.demo_recipe.sources import Source, read_source, stdlib_paths
from spaceport.tools.demo_recipe.tokenizer import train_tokenizer
from spaceport.tools.tune.conversations import read_conversations
from spaceport.tools.tune.extract import Tree, extract

pytestmark = pytest.mark.on_change()

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
    assert len(corpus.lists) == LISTS
    for function in (*corpus.lists, *corpus.held_out):
        tree = extract(answer(function))
        if len(function.parameters) < 3:
            assert not isinstance(tree, Tree)
        else:
            assert isinstance(tree, Tree)
            assert (tree.kind, tree.forks) == ("list", len(function.parameters))
    for function in (*corpus.lists, *corpus.sentences, *corpus.held_out):
        assert asked(question(function)) == function


def test_invented_functions_are_valid_python_and_diverse(sources: list[Source]) -> None:
    rng = np.random.default_rng(0)
    pool = pool_of([function for source in sources for function in functions_in(source.text)])
    found = [invent(pool, rng) for _ in range(400)]
    assert all(read_signature(function.text) == function for function in found)
    assert {len(function.parameters) for function in found} == set(range(3, 9))
    kinds = {parameter.kind for function in found for parameter in function.parameters}
    assert kinds == {"before", "plain", "values", "named", "names"}
    assert len({function.text for function in found}) == len(found)


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


def test_the_same_seed_writes_the_same_files(sources: list[Source], saved: Path, tmp_path: Path) -> None:
    for name, seed in (("again", 0), ("other", 1)):
        save(collect(sources, seed, LISTS), tmp_path / name, seed)
    for file in (files.TRAIN_FILE, files.HELD_OUT_FILE, files.HELD_OUT_TEXT_FILE):
        first, again, other = (
            (folder / file).read_bytes() for folder in (saved, tmp_path / "again", tmp_path / "other")
        )
        assert first == again
        assert first != other


def test_tests_and_data_are_excluded_and_packages_held_out_whole() -> None:
    paths = [path.as_posix() for path in stdlib_paths()]
    assert any(path.endswith("/json/decoder.py") for path in paths)
    for part in ("/test/", "/site-packages/", "/encodings/", "/idlelib/", "/tkinter/", "_sysconfigdata"):
        assert not any(part in path for path in paths)
    by_package: dict[str, set[bool]] = {}
    for source in installed():
        by_package.setdefault(source.path, set()).add(source.held_out)
    assert all(len(held_out) == 1 for held_out in by_package.values())
    assert 0 < sum(next(iter(held_out)) for held_out in by_package.values()) < len(by_package) / 3


def test_windows_are_whole_lines_in_order() -> None:
    lines = [f"line {number} {'x' * (number % 50)}\n" for number in range(200)]
    found = windows("".join(lines))
    assert "".join(lines).startswith("".join(found))
    assert all(window.endswith("\n") and WINDOW // 2 <= len(window) <= WINDOW for window in found)
    assert windows("ä" * WINDOW) == []


def test_the_untrained_model_and_its_tokenizer_have_the_right_shape_and_follow_the_seed(
    corpus: Corpus, tmp_path: Path
) -> None:
    state = torch.random.get_rng_state()
    first, again = (write_scratch(tmp_path, train_tokenizer(corpus.vocabulary), seed=3) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), again.parameters(), strict=True))
    assert first(torch.arange(64)[None]).logits.std() < 2
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert 1_800_000 < sum(weight.numel() for weight in model.parameters()) < 2_300_000
    assert model.config.vocab_size % 64 == 0
    assert model.config.vocab_size - len(tokenizer) >= FREE_ROWS
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>")]
    assert model.generation_config.eos_token_id == ends
    encode = tokenizer.backend_tokenizer.encode
    for text in (question(corpus.lists[0]), answer(corpus.lists[0]), *corpus.texts[:20], "größer \U0001f600 1234"):
        assert tokenizer.decode(encode(text, add_special_tokens=False).ids) == text
    assert [tokenizer.decode([token]) for token in encode("2024", add_special_tokens=False).ids] == list("2024")
    turns = [{"role": "user", "content": "Hello"}]
    opening = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert opening == "<s><|start|>user\nHello<|end|>\n<|start|>assistant\n"
    whole = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": "Hi"}], tokenize=False)
    assert whole == f"{opening}Hi<|end|>\n"
