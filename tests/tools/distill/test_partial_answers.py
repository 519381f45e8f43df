"""The partial file: continued with the same header, refused with another one, and locked."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.distill.partial_answers import RunHeader, opened_partial, partial_file

HEADER = RunHeader(bundle="a" * 64, prompts="b" * 64, max_tokens=64, max_seq_len=256)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bundle": "c" * 64}, "the bundle aaaaaaaaaaaa…, this command has the bundle cccccccccccc…"),
        ({"prompts": "c" * 64}, "the prompts bbbbbbbbbbbb…, this command has the prompts cccccccccccc…"),
        ({"max_tokens": 65}, "--max-tokens 64, this command has --max-tokens 65"),
        ({"max_seq_len": 128}, "--max-seq-len 256, this command has --max-seq-len 128"),
    ],
)
def test_another_header_is_refused_or_begins_anew(out: Path, change: dict[str, int | str], message: str) -> None:
    file = begin(out)
    other = replace(HEADER, **change)  # type: ignore[arg-type]
    with pytest.raises(InputFault) as caught, opened_partial(out, other, False):
        pass
    expected = f"{file}: was begun with {message}: repeat the command of that run to continue it, or begin anew"
    assert expected in str(caught.value)
    assert ANSWER in file.read_text("utf-8")
    with opened_partial(out, other, True):
        assert file.read_text("utf-8") == json.dumps(asdict(other)) + "\n"


OTHER_SCHEMA = json.dumps({**asdict(HEADER), "schema": 2}).encode() + b"\n"
NO_HEADERS = (b"", b"\xff\xfe", b"[]\n", b'{"line": 1}\n', b"[" * 100_000, b'{"schema": 1', OTHER_SCHEMA)


def test_a_file_without_a_header_of_this_version_is_refused(out: Path) -> None:
    for content in NO_HEADERS:
        message = (
            "schema 2, expected 1: another version" if content == OTHER_SCHEMA else "no header of `spaceport distill`"
        )
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
