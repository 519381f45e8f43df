"""Parser: calls are found in text of each format, however it is cut into pieces, and all other text stays text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.runtime.tool_calls.functions import FORMATS, FormatName, format_of
from spaceport.runtime.tool_calls.parser import CallPart, ToolCallParser, other_format
from support.tool_files import joined

NAMES = ("weather", "now")
Calls = list[tuple[str, str]]
OSLO = '{"city": "Oslo"}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>'
LLAMA = f'{{"name": "weather", "parameters": {OSLO}}}'
MISTRAL = f'[{{"name": "weather", "arguments": {OSLO}}}]'
PLAIN = f'{{"name": "weather", "arguments": {OSLO}}}'

CALLS: list[tuple[FormatName, str, str, Calls]] = [  # format, text, content, calls
    ("hermes", HERMES, "", [("weather", OSLO)]),
    ("hermes", f"Let me see.\n\n{HERMES}\n", "Let me see.", [("weather", OSLO)]),
    ("hermes", f"{HERMES}\n{HERMES}", "", [("weather", OSLO)] * 2),
    ("hermes", f" \n{HERMES} done", " done", [("weather", OSLO)]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"a": [1, {"b": null}]}, "name": "now"}', "", [("now", '{"a": [1, {"b": null}]}')]),
    ("hermes", HERMES.removesuffix("all>"), "", [("weather", OSLO)]),
    ("hermes", '<tool_call>{"name":"now","arguments":{"s":"a\\"}</tool_call>\\u00e9"}}</tool_call>',
     "", [("now", '{"s":"a\\"}</tool_call>\\u00e9"}')]),
    ("hermes", f"<tool_call>[{PLAIN}, {PLAIN}]</tool_call>", "", [("weather", OSLO)] * 2),
    ("hermes", '<tool_call>{"name":"now","arguments":{"n":-1.5e3}}</tool_call>', "", [("now", '{"n":-1.5e3}')]),
    ("hermes", f"<tool_call>[{PLAIN} x <tool_call>[{PLAIN}]</tool_call>", " x", [("weather", OSLO)] * 2),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", f"<tool_call>oops {HERMES}", "<tool_call>oops", [("weather", OSLO)]),
    ("llama3", LLAMA, "", [("weather", OSLO)]),
    ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA}\n", "", [("weather", OSLO)] * 2),
    ("llama3", f"\n {PLAIN}", "", [("weather", OSLO)]),
    ("llama3", f"{LLAMA} That is it.", " That is it.", [("weather", OSLO)]),
    ("llama3", f"Here: {LLAMA}", f"Here: {LLAMA}", []),
    ("mistral", f"[TOOL_CALLS]{MISTRAL}", "", [("weather", OSLO)]),
    ("mistral", f"[TOOL_CALLS] [{PLAIN}, {PLAIN}]", "", [("weather", OSLO)] * 2),
    ("mistral", f"One moment. [TOOL_CALLS]weather[ARGS]{OSLO}", "One moment.", [("weather", OSLO)]),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abc123[ARGS]{OSLO}[TOOL_CALLS]now{{}}", "", [("weather", OSLO), ("now", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "123456789"}]', "", [("now", "{}")]),
    ("json", MISTRAL, "", [("weather", OSLO)]),
    ("json", PLAIN, "", [("weather", OSLO)]),
    ("json", f"<think>{{ hm }}</think>\n\n{MISTRAL}", "<think>{ hm }</think>", [("weather", OSLO)]),
    ("llama3", f"So </th </think>{LLAMA}", "So </th </think>", [("weather", OSLO)]),
    ("hermes", f"<think>a</think>\n{HERMES}", "<think>a</think>", [("weather", OSLO)]),
    ("json", f"  {LLAMA}", "", [("weather", OSLO)]),
    ("hermes", PLAIN, "", [("weather", OSLO)]),
    ("mistral", f"\n{MISTRAL}", "", [("weather", OSLO)]),
    ("hermes", f"<think>a</think>\n{PLAIN}", "<think>a</think>", [("weather", OSLO)]),
    ("json", f"Sure:\n```json\n{PLAIN}\n```\nDone.", "Sure:\nDone.", [("weather", OSLO)]),
    ("hermes", f"```\n{PLAIN}\n{PLAIN}\n```", "", [("weather", OSLO)] * 2),
    ("llama3", f"```python\nf()\n``` and ```[{PLAIN}]``", "```python\nf()\n``` and", [("weather", OSLO)]),
    ("hermes", f"```xml\n{HERMES}", "```xml", [("weather", OSLO)]),
]  # fmt: skip

NO_CALLS: list[tuple[FormatName, str]] = [
    *(
        (name, text)
        for name in FORMATS
        for text in ("", "Hi!", " \n", "{", "[", '{"a": 1} is JSON', "[1, 2]", "<", "[T")
    ),
    ("hermes", f"Here: {PLAIN}"),
    ("hermes", '```json\n{"name": "unknown", "arguments": {}}\n```'),
    ("json", "```"),
    ("json", "a ```json\n"),
    ("json", f"a ```{'x' * 40}\n{PLAIN}"),
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Os'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"a":}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {}, "more": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "line\nbreak"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 80 + "1" + "}" * 81),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\\q"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\\u12G4"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}, "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>" * 5),
    ("llama3", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]" + "weather " * 50 + "{}"),
    ("json", '{"name": "weather"'),
    ("json", "So </think> \nHi </thi"),
]


def parsed(name: FormatName, pieces: list[str]) -> tuple[str, Calls]:
    parser = ToolCallParser(FORMATS[name], NAMES)
    parts = [part for piece in pieces for part in parser.push(piece)]
    found = joined([*parts, *parser.finish()])
    assert parser.calls == len(found[1])
    return found


def cuts(text: str) -> list[list[str]]:
    """The text as one piece, cut in two at each index, and in pieces of one and of three characters."""
    halves = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    return [[text], *halves, list(text), [text[at : at + 3] for at in range(0, len(text), 3)]]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CALLS)
def test_calls_are_found_in_any_pieces(name: FormatName, text: str, content: str, calls: Calls) -> None:
    for pieces in cuts(text):
        assert parsed(name, pieces) == (content, calls), pieces
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_text_without_a_valid_call_stays_text(name: FormatName, text: str) -> None:
    for pieces in cuts(text):
        assert parsed(name, pieces) == (text, []), pieces


@given(
    name=st.sampled_from(sorted(FORMATS)),
    texts=st.lists(
        st.sampled_from(
            [HERMES, LLAMA, MISTRAL, PLAIN, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "; ", ", ", "\n", "```"]
        )
        | st.text('{}[]":, \\<tanow1', max_size=6),
        max_size=6,
    ),
    data=st.data(),
)
def test_the_pieces_of_any_text_make_no_difference(name: FormatName, texts: list[str], data: st.DataObject) -> None:
    text = "".join(texts)
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in pairwise([0, *ends, len(text)])]
    content, calls = parsed(name, [text])
    assert parsed(name, pieces) == (content, calls)
    for called, arguments in calls:
        assert called in NAMES
        assert isinstance(json.loads(arguments), dict)
    if not calls:
        assert content == text


def test_text_is_returned_as_soon_as_it_cannot_be_a_call() -> None:
    parser = ToolCallParser(FORMATS["hermes"], NAMES)
    assert parser.push("Hello <b") == ["Hello <b"]
    assert parser.push(" <tool_") == []
    assert parser.push("box>") == [" <tool_box>"]
    for text in ('{"a": 1', '[{"name": "new"'):  # JSON that is no call is not held back until its end
        assert ToolCallParser(FORMATS["json"], NAMES).push(text) == [text]
    plain = ToolCallParser(FORMATS["json"], NAMES)
    assert [plain.push(piece) for piece in ("He", "llo {")] == [["He"], ["llo {"]]


def test_the_arguments_of_a_constrained_call_come_while_they_are_generated() -> None:
    parser = ToolCallParser(FORMATS["hermes"], NAMES, constrained=True)
    pieces = ["<tool_call>\n{", '"name": "weather", "argu', 'ments": {"city"', ': "Os', 'lo"}', "}\n</tool_call>"]
    parts = [CallPart(0, '{"city"', "weather"), CallPart(0, ': "Os'), CallPart(0, 'lo"}')]
    assert [parser.push(piece) for piece in pieces] == [[], [], *([part] for part in parts), []]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("name", "options", "text", "expected"),
    [
        ("hermes", {"constrained": True}, HERMES[:13], ("<tool_call>\n{", [])),
        ("hermes", {"constrained": True}, HERMES[:-17], ("", [("weather", '{"city": "Osl')])),
        ("llama3", {"constrained": True}, LLAMA + '; {"na', ("", [("weather", OSLO)])),  # the start of another call
        ("mistral", {"constrained": True, "opened": True}, MISTRAL, ("", [("weather", OSLO)])),  # [TOOL_CALLS] before
        ("hermes", {"most_calls": 1}, f"Yes. {HERMES}{HERMES}", ("Yes.", [("weather", OSLO)])),
    ],
)
def test_calls_that_are_cut_off_or_too_many_are_left_out(
    name: FormatName, options: dict[str, Any], text: str, expected: tuple[str, Calls]
) -> None:
    parser = ToolCallParser(FORMATS[name], NAMES, **options)
    assert joined([part for sign in text for part in parser.push(sign)] + parser.finish()) == expected


def test_long_texts_take_linear_time() -> None:
    text = '<tool_call>{"a":["' * 20_000
    assert parsed("hermes", [text]) == (text, [])
    text = "<tool_call>[" + '{"name": "now"},' * 20_000
    assert len(parsed("hermes", [text])[1]) == 128


@pytest.mark.parametrize(
    ("own", "text", "other"),
    [
        ("hermes", HERMES, None),
        ("json", HERMES, "hermes"),
        ("hermes", PLAIN, "json"),
        ("mistral", f"Sure: ```json\n{PLAIN}```", "json"),
        ("json", f"Sure: ```json\n{PLAIN}```", None),
        ("llama3", f"[TOOL_CALLS]{MISTRAL}", "mistral"),
        ("llama3", PLAIN, None),
        ("json", "Hi", None),
    ],
)
def test_calls_in_another_format_are_named(own: FormatName, text: str, other: FormatName | None) -> None:
    assert other_format(text, FORMATS[own], NAMES) == other


def test_the_format_is_that_of_the_chat_template() -> None:
    assert format_of("{{ '<tool_call>' }}") == FORMATS["hermes"]
    assert format_of("{{ '[TOOL_CALLS] [' }}") == FORMATS["mistral"]
    assert format_of("<|start_header_id|>ipython<|end_header_id|>") == FORMATS["llama3"]
    assert format_of("<tool_call>\n<function=name>") == format_of("{{ messages }}") == FORMATS["json"]
