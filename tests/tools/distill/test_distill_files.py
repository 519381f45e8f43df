"""The prompt file, whose errors name file and line, and the partial file, which is continued with the same header."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.distill import RunHeader, opened_partial, partial_file, read_prompts
from spaceport.tools.tune.conversations import Turn


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


HEADER = RunHeader(bundle="a" * 64, prompts="b" * 64, max_tokens=64, max_seq_len=256, temperature=0.0)
ANSWER = '{"line": 1}\n'


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def begin(out: Path) -> Path:
    with opened_partial(out, HEADER, False) as file, file.open("a") as stream:
        stream.write(ANSWER)
    return file


def test_a_new_file_begins_with_the_header_and_is_continued(out: Path) -> None:
    file = begin(out)
    assert file == partial_file(out) == out.with_name("out.jsonl.partial")
    content = file.read_text("utf-8")
    assert content == json.dumps(asdict(HEADER)) + "\n" + ANSWER
    for overwrite in (False, True):
        with opened_partial(out, HEADER, overwrite) as again:
            assert again.read_text("utf-8") == content


HEADERS: dict[str, tuple[float | str, str]] = {
    "bundle": ("c" * 64, "the bundle aaaaaaaaaaaa…, this command has the bundle cccccccccccc…"),
    "max_tokens": (65, "--max-tokens 64, this command has --max-tokens 65"),
    "temperature": (0.7, "--temperature 0.0, this command has --temperature 0.7"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_another_header_is_refused_or_begins_anew(out: Path, name: str) -> None:
    file, (value, message) = begin(out), HEADERS[name]
    other = replace(HEADER, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(InputFault) as caught, opened_partial(out, other, False):
        pass
    expected = f"{file}: was begun with {message}: repeat the command of that run to continue it, or begin anew"
    assert expected in str(caught.value)
    assert ANSWER in file.read_text("utf-8")
    with opened_partial(out, other, True):
        assert file.read_text("utf-8") == json.dumps(asdict(other)) + "\n"


OTHER_SCHEMA = json.dumps({**asdict(HEADER), "schema": 3}).encode() + b"\n"


def test_a_file_without_a_header_of_this_version_is_refused(out: Path) -> None:
    for content in (b"", b"\xff\xfe", b"[]\n", b'{"line": 1}\n', b"[" * 100_000, b'{"schema": 1', OTHER_SCHEMA):
        message = "schema 3, expected 2: another" if content == OTHER_SCHEMA else "no header of `spaceport distill`"
        partial_file(out).write_bytes(content)
        with pytest.raises(InputFault, match=f"has {message}"), opened_partial(out, HEADER, False):
            pass
        assert partial_file(out).read_bytes() == content


def test_a_file_that_a_process_writes_is_refused(out: Path) -> None:
    with (
        opened_partial(out, HEADER, False) as file,
        pytest.raises(InputFault, match=f"{file}: another process writes it: wait for its end"),
        opened_partial(out, HEADER, False),
    ):
        pass
    with opened_partial(out, HEADER, False):
        pass
