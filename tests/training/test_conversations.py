"""Conversations: every format is read, errors name the file and line, and answers are split into paragraph trees."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.faults import InputFault
from spaceport.training import conversations
from spaceport.training.conversations import Conversation, Turn, read_conversations
from spaceport.training.extract import extract

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


def test_every_format_is_read_with_its_line_number_and_flags(tmp_path: Path) -> None:
    plain = '{"text": " Plain.\\n", "fork": false, "ends": false}'
    lines = [GOOD, "", json.dumps({**chat("system", "user", "assistant"), "fork": True}), "  \t", plain]
    assert read_conversations(written(tmp_path, "\n".join(lines))) == [
        FOUND,
        Conversation(3, tuple(Turn(role, f"{role} speaks") for role in ("system", "user", "assistant"))),
        Conversation(5, (Turn("text", " Plain.\n"),), fork=False, ends=False),
    ]


@pytest.mark.parametrize(
    "content",
    [
        f"{GOOD}\r\n\r\n",
        '{"response": "Because.", "prompt": "Why?", "id": 7, "source": {"url": "a"}, "score": NaN}',
        '{"messages": [{"role": "user", "content": "Why?", "name": "Ann"}, {"role": "assistant", "content": "Because."}], "prompt": "?"}',
    ],
)
def test_unknown_keys_and_white_space_are_ignored(tmp_path: Path, content: str) -> None:
    assert read_conversations(written(tmp_path, content)) == [FOUND]


def test_byte_order_marks_are_skipped_and_unicode_line_separators_do_not_split_lines(tmp_path: Path) -> None:
    text = "one\u2028two\x85three 日本語 🚀"
    line = json.dumps({"text": text}, ensure_ascii=False)
    found = read_conversations(written(tmp_path, f"\ufeff\r\n{GOOD}\n\ufeff{line}"))
    assert [(one.line, one.turns[-1].content) for one in found] == [(2, "Because."), (3, text)]


MISTAKES: dict[str, tuple[str | bytes, str]] = {
    "plain text": ("Once upon a time.", r"not JSON \(Expecting value at column 1\): .*plain text goes in as {\"text\""),
    "two objects": (GOOD + GOOD, r"not JSON \(Extra data"),
    "nested too deeply": ('{"text": ' + "[" * 200_000, "JSON that is nested too deeply: expected a flat object"),
    "a number without end": ('{"text": ' + "9" * 5000 + "}", r"not JSON \(Exceeds the limit"),
    "Latin-1": ('{"text": "é"}'.encode("latin-1"), r"not UTF-8 text \(invalid continuation byte at byte 10\): save it"),
    "binary": (bytes(range(256)), "not UTF-8 text|not JSON"),
    "two forms": ('{"messages": [], "text": "a"}', 'holds "messages" and "text": expected one of .*, not several'),
    "response blank": ('{"prompt": "a", "response": " \\n"}', '"response" is empty: expected text'),
    "half a character": (
        '{"text": "a \\ud83d b"}',
        r'"text" holds half of a character \(\'\\ud83d\'\): expected whole',
    ),
    "a role unknown": (json.dumps(chat("user", "gpt")), "turn 2 has role 'gpt': expected one of system, user, assist"),
    "content in parts": (
        '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
        r"the content of turn 1 \(user\) is a list: expected a string",
    ),
    "no assistant": (json.dumps(chat("system", "user")), "no assistant turn in messages: expected at least one"),
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
        refused(written(tmp_path, content), ": has no conversation: expected at least one line")
    refused(tmp_path / "nowhere.jsonl", ": no such file: expected a JSONL file")
    refused(tmp_path, ": is a folder: expected a JSONL file of conversations")
    refused(written(tmp_path, GOOD) / "deeper", ": cannot be read: Not a directory")


def test_an_overlong_line_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "LONGEST_LINE", len(GOOD) + 1)
    assert read_conversations(written(tmp_path, f"{GOOD}\n{GOOD}\n"))[1].line == 2
    refused(written(tmp_path, f"{GOOD}\n{GOOD}  \n"), " line 2: longer than 43 bytes: expected one conversation per")


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = written(tmp_path_factory.getbasetemp(), content)
    with pytest.raises(InputFault, match=re.escape(str(file))):
        read_conversations(file)


Cut = list[tuple[str, str | None]]

FIRST = ("1. Red:", " the colour of fire")
REST: Cut = [("\n2. Green:", " the colour of grass"), ("\n3. Blue:", " the colour of the sea")]

LISTS: dict[str, Cut] = {
    "text after the last item": [FIRST, *REST, ("\n\nThere are more.", None)],
    "full-width colons": [
        ("1. 红：", "火的颜色也是血的颜色"),
        ("\n2. 绿：", "草的颜色也是树的颜色"),
        ("\n3. 蓝：", "海的颜色也是天的颜色"),
    ],
    "bold items": [("**1. Red:**", " the colour of fire"), ("\n__2. Green:__", " the colour of grass"), REST[1]],
    "a title with a time": [("1. Red, at 10:30:", " the colour of fire"), *REST],
    "a last detail below its title": [FIRST, REST[0], ("\n3. Blue:", "\n\nthe colour of the sea"), ("\n\nDone.", None)],
    "a last detail of several paragraphs": [
        FIRST,
        REST[0],
        ("\n3. Blue:", " the colour of the sea\n\n   It is deep.\n\n- bullet"),
        ("\n\nDone.", None),
    ],
    "a number inside an item": [("1. Red:", " the colour of\n   1. fire\n   2. cherries"), *REST],
    "Windows line ends": [
        ("Three:\r\n\r\n1. Red:", " the colour of fire"),
        ("\r\n\r\n2. Green:", " the colour\r\n  of grass"),
        ("\r\n3. Blue:", " the colour of the sea"),
        ("\r\n\r\nDone.\r\n", None),
    ],
}

LONG = ("This is the first sentence.", " And a second one. And a third.")
MORE: Cut = [("\n\nA paragraph goes on here.", " More."), ("\n\nThe last one begins so.", " End.")]

PARAGRAPHS: dict[str, Cut] = {
    "bold heads and a paragraph of one sentence": [
        ("**This is the first sentence.**", " It is."),
        ("\n\nOnly one sentence in this one.", None),
        *MORE,
    ],
    "no space between sentences": [("这是第一句话，它至少有二十个字那么长，没错。", "这是第二句。"), *MORE],
    "Windows line ends": [
        ("This is the first sentence.", " And."),
        ("\r\n\r\nA paragraph goes on here.", "\r\nMore."),
        ("\r\n\r\nThe last one begins so.", " End."),
        ("\r\n", None),
    ],
    "words that only end as a title does": [("They stood on the quadr.", " More."), *MORE],
    "a list without titles": [
        ("1. Wash the vegetables well.", " Use cold water."),
        ("\n\n2. Cut them into pieces.", " Mind your fingers."),
        ("\n\n3. Boil for ten minutes.", " Then eat."),
    ],
}


def joined(cut: Cut) -> str:
    return "".join(head + (detail or "") for head, detail in cut)


@pytest.mark.parametrize("cut", [*LISTS.values(), *PARAGRAPHS.values()], ids=[*LISTS, *PARAGRAPHS])
def test_a_list_is_split_after_its_titles_and_paragraphs_after_their_first_sentences(cut: Cut) -> None:
    assert cut_of(joined(cut)) == cut


LIST, PROSE = joined([FIRST, *REST]), joined([LONG, *MORE])
REFUSALS = [
    ("code fence", f"{PROSE}\n\n~~~\ncode\n~~~"),
    ("formula", f"{PROSE} $$x$$"),
    ("link", f"{PROSE} See HTTPS://a.b"),
    ("rule", f"{PROSE}\n| --- |"),
    ("angle bracket", f"{PROSE} b>"),
    ("equals sign", f"{PROSE} a=b"),
    ("fewer than 3 items", joined([FIRST, REST[0]])),
    ("fewer than 3 items", "1. Red: the colour of\n   1. fire\n   2. cherries\n2. Green: the colour of grass"),
    ("numbers out of order", f"{LIST}\n\nAnd:\n\n{LIST}"),
    ("nested list", LIST.replace("fire", "fire\n\n   1. and of cherries")),
    ("item without a title", LIST.replace("Green: ", "")),
    ("detail under 10 characters", LIST.replace("the colour of fire", "012345678")),
    ("detail under 10 characters", LIST.replace("the colour of the sea", "012345678\n\nThere are more colours.")),
    ("abbreviation", PROSE.replace("And a second", "And MRS. Who")),
    ("fewer than 3 paragraphs", joined([LONG, MORE[0]])),
    ("fewer than 3 paragraphs", PROSE.replace("\n\n", "\n")),
    ("fewer than 3 forks", PROSE.replace(" More.", "")),
    ("fewer than 3 forks", PROSE.replace("A paragraph goes on here", "Only 18 letters so")),
]


@pytest.mark.parametrize(("reason", "answer"), REFUSALS)
def test_an_answer_without_a_tree_has_a_reason(reason: str, answer: str) -> None:
    assert extract(answer) == reason


def test_lists_have_priority_and_a_refused_list_is_tried_as_paragraphs() -> None:
    both = LIST.replace("\n", ". Such is it. So it is.\n\n") + ". So it is."
    assert [head for head, _ in cut_of(both)] == ["1. Red:", "\n\n2. Green:", "\n\n3. Blue:"]
    prose = joined(PARAGRAPHS["a list without titles"])
    assert extract(prose.replace("\n\n", "\n")) == "item without a title"


def cut_of(answer: str) -> Cut:
    found = extract(answer)
    assert isinstance(found, tuple), found
    return [(paragraph.head, paragraph.detail) for paragraph in found]


PIECES = ["1. ", "\n2. ", "\n3. ", "\n\n4. ", "Red:", "**Red:**", "红：", "`a: b`:", " the colour of fire", " 日本 🚀"]
PIECES += ["\n", "\n\n", "\r\n\r\n", "\n   ", "This is how it begins.", " And so on.", "。", "*so*", "10:30", "a.b"]
ANSWERS = st.lists(st.sampled_from(PIECES), min_size=12, max_size=40).map("".join)


def whole(answer: str) -> bool:
    """Check the invariants of an extraction; return whether the answer has a tree."""
    if isinstance(extract(answer), str):
        return False
    cut = cut_of(answer)
    assert joined(cut) == answer
    assert sum(detail is not None for _, detail in cut) >= 3
    assert all(head and (detail is None or detail.strip()) for head, detail in cut)
    return True


def test_joining_a_tree_returns_the_answer_and_any_other_text_is_refused() -> None:
    found = []

    @settings(max_examples=600, deadline=None, derandomize=True, database=None)
    @given(answer=ANSWERS | st.text() | st.text(alphabet="12.: \n\r\ta*_`。：!-A", max_size=60))
    def joins(answer: str) -> None:
        found.append(whole(answer))

    joins()
    assert sum(found) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece", ["1. ", "\n", "\n ", "1. a: ", ". ", ".'", ":", "`", " ", "\r\n\r\n", "*", "1.\n\n", "a. b\n\n"]
)
def test_extraction_time_is_linear(piece: str) -> None:
    whole(piece * (100_000 // len(piece)))  # a search at every index would take minutes
