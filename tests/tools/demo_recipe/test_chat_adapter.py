"""Chat adapter: the steps of the recipe, their order, and how it continues."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spaceport.tools.demo_recipe import chat_adapter
from spaceport.tools.demo_recipe.chat_adapter import Recipe, follow

pytestmark = pytest.mark.on_change()

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
    return given


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe(Path("base.gguf"), tmp_path / "work", 64, 8, 4, "1m", "10s", True)


def test_the_recipe_runs_its_commands_in_order(recipe: Recipe, commands: list[list[str]]) -> None:
    assert follow(recipe) == recipe.work / "adapter"
    assert [words[0] for words in commands] == ["export", "distill", "distill", "tune", "distill", "tune"]
    drafts, forks = commands[3], commands[5]
    assert drafts[1:4] == ["base.gguf", str(recipe.work / "drafts"), str(recipe.work / "train.jsonl")]
    assert drafts[drafts.index("--time-budget") + 1] == "1m"
    assert forks[forks.index("--adapter") + 1] == str(recipe.work / "drafts")
    assert forks[forks.index("--time-budget") + 1] == "10s"
    # one answer in forty is held out, and no list
    sizes = {name: len((recipe.work / name).read_text().splitlines()) for name in ("train.jsonl", "validation.jsonl")}
    assert sizes == {"train.jsonl": 48 + 55, "validation.jsonl": 2}
    # only finished lists with titles teach forks, beside as many plain answers
    lines = (recipe.work / "forks.jsonl").read_text().splitlines(keepends=True)
    assert lines == [answered(FORKING)] * 2 + [answered(PLAIN_LIST), answered("Yes.")]
    for name, count in (("list_prompts.jsonl", 8), ("titled_prompts.jsonl", 4)):
        kinds = [json.loads(line)["kind"] for line in (recipe.work / name).read_text().splitlines()]
        assert kinds == ["lists"] * count


def test_without_a_time_for_forks_the_adapter_learns_to_draft_only(recipe: Recipe, commands: list[list[str]]) -> None:
    assert follow(replace(recipe, fork_time=None)) == recipe.work / "drafts"
    assert [words[0] for words in commands] == ["export", "distill", "distill", "tune"]


def test_a_step_with_a_result_is_not_repeated(recipe: Recipe, commands: list[list[str]]) -> None:
    follow(recipe)
    commands.clear()
    (recipe.work / "adapter").rmdir()
    (recipe.work / "adapter.training").mkdir()  # an interrupted training
    follow(recipe)
    assert [words[0] for words in commands] == ["tune"]
    assert commands[0][-1] == "--resume"


def test_a_failed_step_ends_the_recipe_without_a_traceback(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_adapter, "run", lambda words: 3)
    monkeypatch.setattr("sys.argv", ["chat_adapter", str(recipe.work), "--base", "none.gguf"])
    with pytest.raises(SystemExit, match="spaceport export ended with exit code 3; the same command continues"):
        chat_adapter.main()
