"""Chat prompts: seeded, different from each other, and none of the evaluation's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spaceport.tools.demo_recipe import chat_prompts
from spaceport.tools.demo_recipe.chat_prompts import main, prompts, titled_lists

HELD_OUT = Path(chat_prompts.__file__).parents[1] / "demo" / "chat" / "heldout.jsonl"
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


def test_prompts_are_written_as_lines_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["chat_prompts", str(tmp_path / "prompts.jsonl"), "--count", "16", "--seed", "3"])
    main()
    assert [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text("utf-8").splitlines()] == prompts(16, 3)
