"""Measuring chats: kinds, turns and lengths of prompts; the order of subjects, differences, failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import InputFault
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.chat.chat_prompts import NO_KIND, check_lengths, parts_of, read_chat_prompts
from spaceport.tools.bench.chat.measuring import Job, measure
from support.chat_subjects import FakeSubject, chat_prompt
from support.paths import ROOT

HELD_OUT = ROOT / "tools" / "demo" / "chat" / "heldout.jsonl"


def turns(roles: str) -> list[dict[str, str]]:
    """Messages by the first letters of their roles."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[letter], "content": f"{letter}{number}"} for number, letter in enumerate(roles)]


def encode(prompt: Prompt) -> list[int]:
    """A token for each message: its length."""
    return [len(message["content"]) for message in prompt]  # type: ignore[index]


def subjects(*changes: int) -> list[FakeSubject]:
    log: list[tuple[str, tuple[int, ...]]] = []
    plain = FakeSubject("plain", log=log)
    return [plain, *(FakeSubject(f"mode {n}", "plain", change=change, log=log) for n, change in enumerate(changes))]


def test_a_user_turn_without_an_answer_is_answered_and_the_conversation_continues_with_it(tmp_path: Path) -> None:
    for roles, expected in (("u", "u"), ("uuu", "u u u"), ("suu", "su u"), ("uau", "uau"), ("uauu", "uau u")):
        parts = ["".join(message["content"][0] for message in part) for part in parts_of(turns(roles))]
        assert parts == expected.split()
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": turns("suu")}) + "\n" + json.dumps({"text": "plain"}) + "\n", "utf-8")
    chat, plain = read_chat_prompts(file, None)
    assert chat.kind == plain.kind == NO_KIND
    first = chat.prompt([])
    assert first == turns("su")
    assert chat.prompt(["yes"]) == [*first, {"role": "assistant", "content": "yes"}, turns("suu")[2]]
    assert plain.prompt([]) == "plain"
    prompts = read_chat_prompts(HELD_OUT, 1)  # one of each kind
    assert [prompt.line for prompt in prompts] == list(range(1, 201, 25))
    assert len({prompt.kind for prompt in prompts}) == 8


def test_the_length_of_a_conversation_counts_all_its_answers() -> None:
    prompts = [chat_prompt(4), chat_prompt(7, turns=3)]

    def ten_each(prompt: Prompt) -> list[int]:
        return [0] * (10 * len(prompt))

    # Three user turns and two empty answers before the last one; three answers of 7 tokens.
    assert check_lengths(ten_each, prompts, 7, 71, HELD_OUT) == 71
    with pytest.raises(InputFault, match=r"line 7: 50 prompt tokens and 3 answers of 7 tokens .* make 71, .* is 70"):
        check_lengths(ten_each, prompts, 7, 70, HELD_OUT)


def test_all_subjects_answer_a_prompt_before_the_next_one_and_the_order_rotates() -> None:
    modes = subjects(0, 0)
    found = measure([Job(chat_prompt(line), modes) for line in (1, 22)], encode, 2, print)
    names = [mode.name for mode in modes]
    rotated = [names[shift:] + names[:shift] for shift in (0, 1, 2, 2, 0)]  # the first one is the warm-up
    assert [name for name, _ in modes[0].log] == [name for order in rotated for name in order]
    assert len(found.answers) == 2 * 2 * 3
    assert found.compared == {"mode 0": 4, "mode 1": 4}
    assert not found.differences


def test_a_conversation_continues_with_the_plain_answers_and_a_difference_names_its_place() -> None:
    modes = subjects(5)
    found = measure([Job(chat_prompt(7, turns=3), modes)], encode, 1, print)
    prompts = {name: [prompt for other, prompt in modes[0].log[2:] if other == name] for name in ("plain", "mode 0")}
    assert prompts["plain"] == prompts["mode 0"] == [(3,), (3, 8, 3), (3, 8, 3, 9, 3)]  # "answer 3", "answer 14"
    assert found.different == {"mode 0": 3}
    assert [one.turn for one in found.differences] == [1, 2, 3]
    one = found.differences[0].difference
    assert (one.mode, one.reference, one.line, one.token, one.expected, one.found) == ("mode 0", "plain", 7, 1, 3, 8)


def test_a_subject_that_fails_is_not_asked_again() -> None:
    plain, peer = FakeSubject("plain"), FakeSubject("peer", fails=3)
    lines: list[str] = []
    found = measure([Job(chat_prompt(line), [plain, peer]) for line in (1, 2, 3, 4)], encode, 1, lines.append)
    assert lines[0].startswith("4 prompts, 2 modes and runtimes, 1 rounds: at most ")
    assert found.failed == {"peer": "no answer today"}
    assert len(peer.log) == 3  # the warm-up, one answer, the failure
    assert [one.prompt.line for one in found.answers if one.subject == "peer"] == [1]
    assert [one.prompt.line for one in found.answers if one.subject == "plain"] == [1, 2, 3, 4]
