"""Recipes: the data that they make, and both of them from the first command to the last, at a small scale."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from recipes.__main__ import CODER_PROMPTS, own_prompts, recipes
from recipes.data import is_held_out, read_sources, write_data
from recipes.functions import answer, functions_in, invented, question
from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.tools.demo.prompts import MODEL, prompts_of
from spaceport.training.conversations import TEXT, read_conversations
from spaceport.training.extract import Tree, extract

pytestmark = pytest.mark.on_change("tools/demo/chat", "tools/demo/model")

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


def test_the_answer_covers_every_kind_of_parameter() -> None:
    (function,) = functions_in('def every(a, b=1.5, /, c=None, d="x", *rest, e, f=-2, **more): ...')
    assert (question(function), answer(function)) == (QUESTION, ANSWER)
    (method,) = functions_in("class A:\n    def f(self, a, b=1, /): ...")
    assert answer(method) == "The function f has two parameters, a, which is required, and b, which is optional."
    assert not isinstance(extract(answer(method)), Tree)


def test_every_invented_function_forks_once_per_parameter() -> None:
    real = [one for path, text in read_sources().items() if path.startswith("json/") for one in functions_in(text)]
    found = list(islice(invented(real, Random(1)), 200))
    assert len({one.text for one in found}) > 190
    for function in found:
        tree = extract(answer(function))
        assert isinstance(tree, Tree)
        assert tree.forks == len(function.parameters) >= 3


def test_held_out_files_are_not_in_the_training_data(tmp_path: Path) -> None:
    ends = ("argparse.py", "copy.py", "json/decoder.py", "shlex.py", "textwrap.py", "weakref.py")
    sources = {path: text for path, text in read_sources().items() if path in ends}
    own = "".join(text for path, text in sources.items() if not is_held_out(path))
    assert {is_held_out(path) for path in sources} == {True, False}
    write_data(tmp_path, sources, lists=300, sentences=20, texts=50)
    trained, held_out = (list(read_conversations(tmp_path / f"{name}.jsonl")) for name in ("train", "heldout"))
    chats = [one for one in trained if one.turns[0].role != TEXT]
    assert Counter(one.fork for one in chats)[False] > 30  # some are repeated without forks
    assert len({one.turns for one in chats}) == 320
    assert {one.turns[0] for one in trained}.isdisjoint(one.turns[0] for one in held_out)
    assert all(one.turns[0].content in own and not one.ends for one in trained if one.turns[0].role == TEXT)
    assert not any(one.turns[0].content in own for one in held_out)


def follow(*arguments: object) -> str:
    """What a recipe prints."""
    done = CliRunner().invoke(recipes, [*map(str, arguments), "--trial"])
    assert done.exit_code == 0, f"{done.output}{done.exception}"
    return done.output


@pytest.mark.slow
@pytest.mark.nightly
def test_the_demo_model_is_trained(tmp_path: Path) -> None:
    shown = follow("demo", tmp_path)
    assert [line.split()[2] for line in shown.splitlines() if line[:1] == "$"] == [
        "tune",
        "acceptance",
        "export",
        "bench",
    ]
    checkpoint = open_checkpoint(tmp_path / "model", TokenFlags())
    assert (checkpoint.drafts.mask_slots, checkpoint.tokens.fork is None) == (5, False)
    assert prompts_of(tmp_path / "model") == prompts_of(MODEL)
    again = follow("demo", tmp_path)  # what is there is not made again
    assert [line.split()[2] for line in again.splitlines() if line[:1] == "$"] == ["acceptance", "bench"]


@pytest.mark.slow
def test_the_chat_adapter_is_trained(tmp_path: Path, demo_bundle: Path) -> None:
    (tmp_path / "base.bundle").symlink_to(demo_bundle)
    texts = [f"Explain the parameters of f( a, b, c = {number} )" for number in range(4)]
    (tmp_path / "own_prompts.json").write_text(json.dumps(texts), "utf-8")
    shown = follow("chat", tmp_path, "--base", MODEL, "--prompts", 3)
    assert [line.split()[2] for line in shown.splitlines() if line[:1] == "$"] == [
        *["distill"] * 3,
        *["tune"] * 2,
        "acceptance",
    ]
    sar = json.loads((tmp_path / "adapter" / "sar_config.json").read_text("utf-8"))
    assert len(sar["acceptance"][0]["rates"]) == 4


@pytest.mark.slow
@pytest.mark.nightly
def test_the_coder_adapter_is_trained(tmp_path: Path, demo_bundle: Path) -> None:
    (tmp_path / "base.bundle").symlink_to(demo_bundle)
    shown = follow("coder", tmp_path, "--base", MODEL)
    assert [line.split()[2] for line in shown.splitlines() if line[:1] == "$"] == [
        *["distill"] * 3,
        "tune",
        "acceptance",
    ]
    sar = json.loads((tmp_path / "adapter" / "sar_config.json").read_text("utf-8"))
    assert len(sar["acceptance"][0]["rates"]) == 4


def test_prompts_of_the_coder_are_not_those_it_is_measured_with() -> None:
    trained, held_out = (
        {json.loads(line)["prompt"] for line in file.read_text("utf-8").splitlines()}
        for file in (CODER_PROMPTS, CODER_PROMPTS.parents[2] / "tools" / "demo" / "coder" / "heldout.jsonl")
    )
    assert (len(trained), len(held_out)) == (889, 100)
    assert trained.isdisjoint(held_out)


def test_own_prompts_are_different_finished_messages(tiny_bundle: Path, tmp_path: Path) -> None:
    own = own_prompts(tiny_bundle, tmp_path / "own.json", 3)
    assert len(set(own)) == 3
    assert all(len(text) > 11 and text == text.strip() for text in own)
    assert own_prompts(tmp_path, tmp_path / "own.json", 3) == own  # from the file
