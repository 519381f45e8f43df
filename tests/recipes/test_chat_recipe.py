"""Chat recipe: its prompts, its steps and their order, and how it continues."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes import chat_adapter
from recipes.chat_adapter import Recipe, follow
from recipes.chat_prompts import prompts, titled_lists
from recipes.own_prompts import own_prompts
from support.paths import ROOT

HELD_OUT = ROOT / "tools" / "demo" / "chat" / "heldout.jsonl"
KINDS = ("writing", "reasoning", "code", "extraction", "summarizing", "lists", "translation", "chat")

pytestmark = pytest.mark.on_change("tools/demo/chat")


def turns_of(found: Sequence[Any]) -> list[tuple[str, ...]]:
    return [tuple(each["content"] for each in prompt["messages"] if each["role"] == "user") for prompt in found]


def test_prompts_follow_the_seed_are_all_different_and_come_in_eight_kinds() -> None:
    assert prompts(80, 1) == prompts(80, 1) != prompts(80, 2)
    assert titled_lists(8, 3) != titled_lists(8, 2)
    found, titled = prompts(1600, 0), titled_lists(40, 2)
    assert len(set(turns_of(found))) == 1600
    assert Counter(prompt["kind"] for prompt in found) == dict.fromkeys(KINDS, 200)
    assert {prompt["kind"] for prompt in titled} == {"lists"}
    assert len(set(turns_of(titled))) == 40
    assert all("title, a colon" in last for (*_, last) in turns_of(titled))
    with pytest.raises(ValueError, match="ask for fewer"):
        prompts(20_000, 0)


def test_the_evaluation_has_25_prompts_of_each_kind_and_none_of_them_is_generated() -> None:
    held_out = [json.loads(line) for line in HELD_OUT.read_text("utf-8").splitlines()]
    assert Counter(prompt["kind"] for prompt in held_out) == dict.fromkeys(KINDS, 25)
    assert len(set(turns_of(held_out))) == len(held_out)
    generated = {turn for turns in turns_of([*prompts(4000, 0), *titled_lists(40, 2)]) for turn in turns}
    assert not generated & {turn for turns in turns_of(held_out) for turn in turns}


def test_own_prompts_are_finished_messages_of_the_model_that_follow_the_seed(tiny_bundle: Path) -> None:
    own = own_prompts(tiny_bundle, 3, seed=1, most=144)
    assert own == own_prompts(tiny_bundle, 3, seed=1, most=144) != own_prompts(tiny_bundle, 3, seed=2, most=144)
    assert len(set(turns_of(own))) == 3
    assert all(12 <= len(text) <= 400 and text == text.strip() for (text,) in turns_of(own))
    with pytest.raises(ValueError, match="expected 3000: ask for fewer"):
        own_prompts(tiny_bundle, 3000, seed=1, most=4)


PLAIN_LIST = "1. Red\n2. Green\n3. Blue"
PARAGRAPHS = "\n\n".join(f"This is sentence number {name}. It has another one." for name in ("one", "two", "three"))
FORKING = "1. Red: the colour of fire\n2. Green: the colour of grass\n3. Blue: the colour of the sea"


def answered(text: str, **keys: object) -> str:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    return json.dumps({"messages": turns, **keys}) + "\n"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of a recipe, which write what they would have written."""
    given: list[list[str]] = []

    def run(words: list[str]) -> int:
        given.append(words)
        target = Path(words[3] if words[0] == "distill" else words[2])
        if words[0] == "distill":
            lists = target.name.startswith(("list", "titled"))
            cut = answered(FORKING, ends=False)
            found = answered(FORKING) + cut + answered(PARAGRAPHS) + answered(PLAIN_LIST) * 2 if lists else ""
            target.write_text(found + answered("Yes.") * 50, "utf-8")
        else:
            target.mkdir()
        return 0

    monkeypatch.setattr(chat_adapter, "run", run)
    monkeypatch.setattr(chat_adapter, "own_prompts", lambda bundle, wanted, seed: [{"prompt": str(seed)}] * wanted)
    return given


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe(Path("base.gguf"), tmp_path / "work", 64, 16, 8, 4, "1m", "10s", True)


def test_the_recipe_runs_its_commands_in_order(recipe: Recipe, commands: list[list[str]]) -> None:
    assert follow(recipe) == recipe.work / "adapter"
    assert [words[0] for words in commands] == ["export", *["distill"] * 3, "tune", "distill", "tune"]
    drafts, forks = commands[4], commands[6]
    assert drafts[1:4] == ["base.gguf", str(recipe.work / "drafts"), str(recipe.work / "train.jsonl")]
    assert drafts[drafts.index("--time-budget") + 1] == "1m"
    assert forks[forks.index("--adapter") + 1] == str(recipe.work / "drafts")
    assert forks[forks.index("--time-budget") + 1] == "10s"
    # one answer in forty is held out, and no list
    sizes = {name: len((recipe.work / name).read_text().splitlines()) for name in ("train.jsonl", "validation.jsonl")}
    assert sizes == {"train.jsonl": 97 + 55, "validation.jsonl": 3}
    # only finished lists with titles teach forks, beside as many plain answers
    lines = (recipe.work / "forks.jsonl").read_text().splitlines(keepends=True)
    assert lines == [answered(FORKING)] * 2 + [answered(PLAIN_LIST), answered("Yes.")]
    for name, count in (("list_prompts.jsonl", 8), ("titled_prompts.jsonl", 4)):
        kinds = [json.loads(line)["kind"] for line in (recipe.work / name).read_text().splitlines()]
        assert kinds == ["lists"] * count
    commands.clear()
    drafting = replace(recipe, work=recipe.work.with_name("other"), fork_time=None)  # it learns to draft only
    assert follow(drafting) == drafting.work / "drafts"
    assert [words[0] for words in commands] == ["export", *["distill"] * 3, "tune"]


def test_a_step_with_a_result_is_not_repeated(recipe: Recipe, commands: list[list[str]]) -> None:
    follow(recipe)
    commands.clear()
    (recipe.work / "adapter").rmdir()
    (recipe.work / "adapter.training").mkdir()  # an interrupted training
    follow(recipe)
    assert [words[0] for words in commands] == ["tune"]
    assert commands[0][-1] == "--resume"
