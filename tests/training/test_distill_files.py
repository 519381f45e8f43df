"""The prompt file: its formats, and errors that name file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spaceport.graphs.contract.faults import InputFault
from spaceport.training.conversations import Turn
from spaceport.training.distill import read_prompts


def written(folder: Path, content: str | bytes, name: str = "prompts.jsonl") -> Path:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def chat(*roles: str, **others: Any) -> str:
    turns = [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]
    return json.dumps({"messages": turns, **others})


# Roles of the given turns -> indices of the turns of each part
PARTS = {
    ("system", "user"): [[0, 1]],
    ("user", "user", "user"): [[0], [1], [2]],
    ("user", "user", "assistant", "user", "user"): [[0], [1, 2, 3], [4]],
    ("user", "assistant", "user", "assistant"): [[0, 1, 2]],
    ("user", "assistant", "tool", "tool", "user"): [[0, 1, 2, 3], [4]],
}


@pytest.mark.parametrize("roles", PARTS, ids="-".join)
def test_each_turn_without_an_answer_ends_a_part(tmp_path: Path, roles: tuple[str, ...]) -> None:
    (found,) = read_prompts(written(tmp_path, chat(*roles)))
    expected = tuple(tuple(Turn(roles[n], f"{roles[n]} {n}") for n in part) for part in PARTS[roles])
    assert found.parts == expected


def test_other_keys_and_line_numbers_are_stored(tmp_path: Path) -> None:
    lines = [
        "",
        chat("user", kind="code", id=7, fork=False, ends=False),
        '{"prompt": "Why?", "response": "No.", "id": 8}',
    ]
    found = read_prompts(written(tmp_path, "\n".join(lines)))
    assert [one.line for one in found] == [2, 3]
    assert [one.others for one in found] == [{"kind": "code", "id": 7, "fork": False}, {"id": 8}]
    assert found[1].parts == ((Turn("user", "Why?"),),)


def test_a_text_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    found = read_prompts(written(tmp_path, '\ufeffWhy?\r\n\n  {"prompt": 1}\u2028more\n', "prompts.TXT"))
    contents = [(one.line, one.parts[0][0].content, one.others) for one in found]
    assert contents == [(1, "Why?", {}), (3, '  {"prompt": 1}\u2028more', {})]


REFUSED = [
    ('{"text": "a"}', 'holds "text": expected "messages" or "prompt"'),
    ('{"prompt": "a", "messages": []}', 'holds "messages" and "prompt": expected "messages" or "prompt", not both'),
    ('{"prompt": " "}', '"prompt" is empty: expected text'),
    (chat("system"), "the last turn is of the system: expected a user turn last"),
    (chat("assistant"), "turn 1 is of the assistant: expected a turn before it"),
    ("Why?", "not JSON (Expecting value at column 1): expected one object on each line; plain text goes into"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_other_lines_are_refused_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
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
