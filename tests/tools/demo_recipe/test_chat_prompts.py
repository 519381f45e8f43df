"""Chat prompts: seeded, different from each other, and none of the evaluation's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from spaceport.tools.demo_recipe import chat_prompts
from spaceport.tools.demo_recipe.chat_prompts import main, prompts, titled_lists

HELD_OUT = Path(chat_prompts.__file__).parents[1] / "demo" / "chat" / "heldout.jsonl"


def user_turns(prompt: dict[str, object]) -> tuple[str, ...]:
    messages = prompt["messages"]
    assert isinstance(messages, list)
    return tuple(message["content"] for message in messages if message["role"] == "user")


def test_a_seed_gives_the_same_prompts_and_another_seed_gives_others() -> None:
    assert prompts(80, 1) == prompts(80, 1) != prompts(80, 2)


def test_prompts_are_all_different_and_come_in_eight_kinds() -> None:
    found = prompts(1600, 0)
    assert len({user_turns(prompt) for prompt in found}) == 1600
    assert Counter(prompt["kind"] for prompt in found) == dict.fromkeys(
        ("writing", "reasoning", "code", "extraction", "summarizing", "lists", "translation", "chat"), 200
    )


def test_the_evaluation_has_25_prompts_of_each_kind_and_none_of_them_is_generated() -> None:
    held_out = [json.loads(line) for line in HELD_OUT.read_text("utf-8").splitlines()]
    generated = {turn for prompt in prompts(4000, 0) for turn in user_turns(prompt)}
    kinds = Counter(prompt["kind"] for prompt in held_out)
    assert set(kinds.values()) == {25}
    assert kinds.keys() == {prompt["kind"] for prompt in prompts(8, 0)}
    assert len({user_turns(prompt) for prompt in held_out}) == len(held_out)
    assert not generated & {turn for prompt in held_out for turn in user_turns(prompt)}


def test_lists_with_titles_ask_for_a_colon_and_none_of_them_is_held_out() -> None:
    found = [user_turns(prompt) for prompt in titled_lists(40, 2)]
    assert len(set(found)) == 40
    assert all("title, a colon" in last for (*_, last) in found)
    assert {prompt["kind"] for prompt in titled_lists(40, 2)} == {"lists"}
    held_out = [json.loads(line) for line in HELD_OUT.read_text("utf-8").splitlines()]
    assert not {turn for turns in found for turn in turns} & {
        turn for prompt in held_out for turn in user_turns(prompt)
    }
    assert titled_lists(8, 3) != titled_lists(8, 2)[:8]


def test_too_many_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="ask for fewer"):
        prompts(40_000, 0)


def test_prompts_are_written_as_lines_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["chat_prompts", str(tmp_path / "prompts.jsonl"), "--count", "16", "--seed", "3"])
    main()
    assert [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text("utf-8").splitlines()] == prompts(16, 3)
