"""Chat prompts: kinds, samples, turns, lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import InputFault
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.chat.chat_prompts import NO_KIND, check_lengths, parts_of, read_chat_prompts
from support.chat_subjects import chat_prompt
from support.paths import ROOT

HELD_OUT = ROOT / "tools" / "demo" / "chat" / "heldout.jsonl"


def turns(roles: str) -> list[dict[str, str]]:
    """Messages by the first letters of their roles."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[letter], "content": f"{letter}{number}"} for number, letter in enumerate(roles)]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [("u", ["u"]), ("uuu", ["u", "u", "u"]), ("suu", ["su", "u"]), ("uau", ["uau"]), ("uauu", ["uau", "u"])],
)
def test_a_user_turn_is_answered_if_no_answer_follows_it(roles: str, expected: list[str]) -> None:
    parts = ["".join(message["content"][0] for message in part) for part in parts_of(turns(roles))]
    assert parts == expected


def test_a_conversation_continues_with_the_answers(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": turns("suu")}) + "\n" + json.dumps({"text": "plain"}) + "\n", "utf-8")
    chat, plain = read_chat_prompts(file, None)
    assert chat.kind == plain.kind == NO_KIND
    first = chat.prompt([])
    assert first == turns("su")
    assert chat.prompt(["yes"]) == [*first, {"role": "assistant", "content": "yes"}, turns("suu")[2]]
    assert plain.prompt([]) == "plain"


def test_the_held_out_prompts_have_eight_kinds_that_alternate() -> None:
    prompts = read_chat_prompts(HELD_OUT, 2)
    kinds = [prompt.kind for prompt in prompts]
    assert len(kinds) == 16
    assert kinds[:8] == kinds[8:]
    assert len(set(kinds)) == 8
    assert {(len(prompt.parts), len(prompt.parts[0])) for prompt in prompts} == {(1, 1), (1, 3)}
    assert len(read_chat_prompts(HELD_OUT, None)) == 200
    assert [prompt.line for prompt in read_chat_prompts(HELD_OUT, 1)] == list(range(1, 201, 25))


def test_the_length_of_a_conversation_counts_all_its_answers() -> None:
    prompts = [chat_prompt(4), chat_prompt(7, turns=3)]

    def encode(prompt: Prompt) -> list[int]:
        return [0] * (10 * len(prompt))  # ten tokens a message

    # Three user turns and two empty answers before the last one; three answers of 7 tokens.
    assert check_lengths(encode, prompts, 7, 71, HELD_OUT) == 71
    with pytest.raises(InputFault, match=r"line 7: 50 prompt tokens and 3 answers of 7 tokens .* make 71, .* is 70"):
        check_lengths(encode, prompts, 7, 70, HELD_OUT)
