"""Conversations: every format is read, and errors name the file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.tune import json_lines
from spaceport.tools.tune.conversations import Conversation, Turn, read_conversations

GOOD = '{"prompt": "Why?", "response": "Because."}'
FOUND = Conversation(1, (Turn("user", "Why?"), Turn("assistant", "Because.")))


def written(folder: Path, content: str | bytes) -> Path:
    file = folder / "train.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def chat(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": f"{role} speaks"} for role in roles]}


def refused(file: Path, message: str) -> None:
    with pytest.raises(InputFault, match=f"^{re.escape(str(file))}{message}"):
        read_conversations(file)


def test_every_format_is_read_with_its_line_number(tmp_path: Path) -> None:
    lines = [GOOD, "", json.dumps(chat("system", "user", "assistant")), "  \t", '{"text": " Plain.\\n"}']
    assert read_conversations(written(tmp_path, "\n".join(lines))) == [
        FOUND,
        Conversation(3, tuple(Turn(role, f"{role} speaks") for role in ("system", "user", "assistant"))),
        Conversation(5, (Turn("text", " Plain.\n"),)),
    ]


@pytest.mark.parametrize(
    "content",
    [
        f"{GOOD}\r\n\r\n",
        f"\ufeff{GOOD}\n",
        '{"response": "Because.", "prompt": "Why?", "id": 7, "source": {"url": "a"}, "score": NaN}',
        '{"messages": [{"role": "user", "content": "Why?", "name": "Ann"}, {"role": "assistant", "content": "Because."}], "prompt": "?"}',
    ],
)
def test_unknown_keys_and_white_space_are_ignored(tmp_path: Path, content: str) -> None:
    assert read_conversations(written(tmp_path, content)) == [FOUND]


def test_byte_order_marks_are_skipped_and_unicode_line_separators_do_not_split_lines(tmp_path: Path) -> None:
    found = read_conversations(written(tmp_path, f"\ufeff\r\n{GOOD}\n\ufeff{GOOD}"))
    assert [one.line for one in found] == [2, 3]
    text = "one\u2028two\x85three 日本語 🚀"
    line = json.dumps({"text": text}, ensure_ascii=False)
    assert read_conversations(written(tmp_path, line))[0].turns[0].content == text


@pytest.mark.parametrize(
    ("roles", "answer"),
    [
        ("user assistant user assistant", 3),
        ("system user assistant tool assistant user", 4),
        ("system assistant", 1),
        ("user user assistant tool tool", 2),
    ],
)
def test_the_answer_is_the_last_assistant_message(tmp_path: Path, roles: str, answer: int) -> None:
    turns = [{"role": role, "content": f"{number}"} for number, role in enumerate(roles.split())]
    (found,) = read_conversations(written(tmp_path, json.dumps({"messages": turns})))
    assert found.answer == str(answer)


def test_the_fork_and_ends_flags_are_read(tmp_path: Path) -> None:
    flags: list[dict[str, bool]] = [{}, {"fork": False}, {"ends": False}, {"fork": True, "ends": True}]
    found = read_conversations(written(tmp_path, "\n".join(json.dumps({"text": "a", **each}) for each in flags)))
    assert [(one.fork, one.ends) for one in found] == [(True, True), (False, True), (True, False), (True, True)]
    assert found[0].answer is None  # a plain text has none


MISTAKES: dict[str, tuple[str | bytes, str]] = {
    "plain text": ("Once upon a time.", r"not JSON \(Expecting value at column 1\): .*plain text goes in as {\"text\""),
    "cut off": ('{"text": "abc', r"not JSON \(Unterminated string.* at column 10\): expected one object"),
    "two objects": (GOOD + GOOD, r"not JSON \(Extra data"),
    "a list": ("[]", "holds a list: expected an object on each line"),
    "a number": ("7", "holds a number: expected an object"),
    "nested too deeply": ('{"text": ' + "[" * 200_000, "JSON that is nested too deeply: expected a flat object"),
    "a number without end": ('{"text": ' + "9" * 5000 + "}", r"not JSON \(Exceeds the limit"),
    "Latin-1": ('{"text": "é"}'.encode("latin-1"), r"not UTF-8 text \(invalid continuation byte at byte 10\): save it"),
    "UTF-16": (GOOD.encode("utf-16"), "not UTF-8 text"),
    "binary": (bytes(range(256)), "not UTF-8 text|not JSON"),
    "no form": ('{"id": 7, "input": "?"}', 'holds "id", "input": expected one of "messages", "prompt" with "response"'),
    "two forms": ('{"messages": [], "text": "a"}', 'holds "messages" and "text": expected one of .*, not several'),
    "prompt alone": ('{"prompt": "Why?"}', 'holds "prompt" alone: expected one of'),
    "response alone": ('{"response": "Because."}', 'holds "response" alone: expected one of'),
    "response blank": ('{"prompt": "a", "response": " \\n"}', '"response" is empty: expected text'),
    "text null": ('{"text": null}', '"text" is null: expected a string'),
    "fork a word": ('{"text": "a", "fork": "no"}', '"fork" is a string: expected true or false'),
    "half a character": (
        '{"text": "a \\ud83d b"}',
        r'"text" holds half of a character \(\'\\ud83d\'\): expected whole',
    ),
    "messages an object": ('{"messages": {}}', '"messages" is an object: expected a list of turns'),
    "no messages": ('{"messages": []}', '"messages" is an empty list: expected a list of turns'),
    "a message a string": ('{"messages": ["Why?"]}', 'turn 1 is a string: expected an object with "role"'),
    "a role unknown": (json.dumps(chat("user", "gpt")), "turn 2 has role 'gpt': expected one of system, user, assist"),
    "a role a list": ('{"messages": [{"role": [], "content": "Why?"}]}', "turn 1 has role a list: expected one of"),
    "content in parts": (
        '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
        r"the content of turn 1 \(user\) is a list: expected a string",
    ),
    "content empty": (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}',
        r"the content of turn 2 \(assistant\) is empty: expected text",
    ),
    "no assistant": (json.dumps(chat("system", "user")), "no assistant turn in messages: expected at least one"),
    "assistant first": (json.dumps(chat("assistant", "user")), "turn 1 is of the assistant: expected a turn before"),
    "assistant twice": (json.dumps(chat("user", "assistant", "assistant")), "turns 2 and 3 are both of the assistant"),
    "system late": (json.dumps(chat("user", "system", "assistant")), "turn 2 is of the system: expected it first"),
    "tool uncalled": (json.dumps(chat("user", "tool", "assistant")), "turn 2 is of a tool: expected a turn of the ass"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_an_invalid_line_is_reported_with_file_and_line(tmp_path: Path, kind: str) -> None:
    content, message = MISTAKES[kind]
    line = content if isinstance(content, bytes) else content.encode()
    refused(written(tmp_path, line), f" line 1: ({message})")
    if kind != "binary":  # has line ends in it
        refused(written(tmp_path, f"{GOOD}\r\n\r\n".encode() + line), f" line 3: ({message})")


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    for content in ("", "\n\r\n  \n", "\ufeff"):
        refused(written(tmp_path, content), ": contains no conversation: expected at least one line of JSON")
    refused(tmp_path / "nowhere.jsonl", ": no such file: expected a JSONL file")
    refused(tmp_path, ": is a folder: expected a JSONL file of conversations")
    refused(written(tmp_path, GOOD) / "deeper", ": cannot be read: Not a directory")


def test_an_overlong_line_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "LONGEST_LINE", len(GOOD) + 1)
    assert read_conversations(written(tmp_path, f"{GOOD}\n{GOOD}\n"))[1].line == 2
    refused(written(tmp_path, f"{GOOD}\n{GOOD}  \n"), " line 2: longer than 43 bytes: expected one conversation per")


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = written(tmp_path_factory.getbasetemp(), content)
    with pytest.raises(InputFault, match=re.escape(str(file))):
        read_conversations(file)
