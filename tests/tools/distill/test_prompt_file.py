"""The prompt file: which turns are answered, which keys are repeated, and errors that name file and line."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.distill.prompt_file import read_prompts
from spaceport.tools.tune.conversations import ROLES, Turn


def written(folder: Path, content: str | bytes, name: str = "prompts.jsonl") -> Path:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def chat(*roles: str, **others: Any) -> str:
    turns = [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]
    return json.dumps({"messages": turns, **others})


# Roles of the given turns -> indices of the turns of each part
PARTS = {
    ("user",): [[0]],
    ("system", "user"): [[0, 1]],
    ("user", "user", "user"): [[0], [1], [2]],
    ("system", "user", "user"): [[0, 1], [2]],
    ("user", "assistant", "user"): [[0, 1, 2]],
    ("user", "assistant"): [[0]],
    ("user", "user", "assistant", "user", "user"): [[0], [1, 2, 3], [4]],
    ("user", "assistant", "user", "assistant"): [[0, 1, 2]],
    ("user", "assistant", "tool"): [[0, 1, 2]],
    ("user", "assistant", "tool", "tool", "user"): [[0, 1, 2, 3], [4]],
}


@pytest.mark.parametrize("roles", PARTS, ids="-".join)
def test_each_turn_without_an_answer_ends_a_part(tmp_path: Path, roles: tuple[str, ...]) -> None:
    (found,) = read_prompts(written(tmp_path, chat(*roles)))
    expected = tuple(tuple(Turn(roles[n], f"{roles[n]} {n}") for n in part) for part in PARTS[roles])
    assert found.prompt.parts == expected


def test_other_keys_and_line_numbers_are_stored(tmp_path: Path) -> None:
    lines = [
        "",
        chat("user", kind="code", id=7, fork=False, ends=False),
        '{"prompt": "Why?", "response": "No.", "id": 8}',
    ]
    found = read_prompts(written(tmp_path, "\n".join(lines)))
    assert [one.line for one in found] == [2, 3]
    assert [one.others for one in found] == [{"kind": "code", "id": 7, "fork": False}, {"id": 8}]
    assert found[1].prompt.parts == ((Turn("user", "Why?"),),)


def test_a_text_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    found = read_prompts(written(tmp_path, '\ufeffWhy?\r\n\n  {"prompt": 1}\u2028more\n', "prompts.TXT"))
    assert [(one.line, one.prompt.parts[0][0].content) for one in found] == [
        (1, "Why?"),
        (3, '  {"prompt": 1}\u2028more'),
    ]
    assert [one.others for one in found] == [{}, {}]


REFUSED = {
    "text": ('{"text": "a"}', 'holds "text": expected "messages" or "prompt"'),
    "nothing": ('{"id": 3}', 'holds neither: expected "messages" or "prompt"'),
    "both": (
        '{"prompt": "a", "messages": []}',
        'holds "messages" and "prompt": expected "messages" or "prompt", not both',
    ),
    "empty prompt": ('{"prompt": " "}', '"prompt" is empty: expected text'),
    "number": ('{"prompt": 3}', '"prompt" is a number: expected a string'),
    "system last": (chat("system"), "the last turn is of the system: expected a user turn last"),
    "no turns": ('{"messages": []}', '"messages" is an empty list: expected a list of turns'),
    "unknown role": (chat("robot"), "turn 1 has role 'robot': expected one of system, user"),
    "answer first": (chat("assistant"), "turn 1 is of the assistant: expected a turn before it"),
    "no JSON": (
        "Why?",
        "not JSON (Expecting value at column 1): expected one object on each line; plain text goes into",
    ),
    "no object": ("[]", "holds a list: expected an object on each line"),
    "fork": ('{"prompt": "a", "fork": 1}', '"fork" is a number: expected true or false'),
    "half of a character": ('{"prompt": "\\ud800"}', '"prompt" holds half of a character'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_lines_are_refused_with_file_and_line(tmp_path: Path, name: str) -> None:
    line, message = REFUSED[name]
    file = written(tmp_path, f"{chat('user')}\n{line}\n")
    with pytest.raises(InputFault, match=re.escape(f"{file} line 2: {message}")):
        read_prompts(file)


def test_files_without_a_prompt_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFault, match="has no prompt: expected at least one line"):
        read_prompts(written(tmp_path, "\n\n"))
    with pytest.raises(InputFault, match="no such file: expected a prompt file with one prompt per line"):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(InputFault, match=r"line 1: not UTF-8 text \(invalid start byte at byte 0\): save it as UTF-8"):
        read_prompts(written(tmp_path, b"\xff\n", "prompts.txt"))


@settings(max_examples=200)
@given(roles=st.lists(st.sampled_from(ROLES), min_size=1, max_size=8))
def test_parts_repeat_the_turns_before_the_last_answer(
    tmp_path_factory: pytest.TempPathFactory, roles: list[str]
) -> None:
    file = written(tmp_path_factory.getbasetemp(), chat(*roles))
    try:
        (found,) = read_prompts(file)
    except InputFault:
        return
    given_roles = roles[:-1] if roles[-1] == "assistant" else roles
    assert [turn.role for part in found.prompt.parts for turn in part] == given_roles
    for part in found.prompt.parts:
        assert part[-1].role in ("user", "tool")
        assert "user" not in [one.role for one, other in pairwise(part) if other.role == "user"]
