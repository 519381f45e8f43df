"""Messages: a template gets arguments, contents and parts in the form that it reads, and the end of the last one is found."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import Environment

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.text.chat import ChatTemplate
from spaceport.runtime.text.content_parts import reads_parts, with_joined_parts
from spaceport.runtime.text.final_message import cut_at_mark, with_end_mark
from spaceport.runtime.text.tool_messages import compares_content, joins_arguments, with_arguments

TEXT = '{"city": "Łódź"}'
OBJECT = {"city": "Łódź"}


def turns(arguments: object, nested: bool = True) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": arguments}
    call = {"type": "function", "function": function} if nested else function
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("template", "joins"),
    [
        ("{{ call.arguments | tojson }}", False),
        ("{{ '{' + (call.arguments | tojson) + '}' }}", False),
        (
            "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}",
            False,
        ),
        ("{{ call.function | tojson }}", False),
        ("{{ '```json\n' + tool['function']['arguments'] + '\n```' }}", True),
        ("{{ tool.function.name ~ tool.function.arguments }}", True),
        ("{% set given = tool.function.arguments %}{{ 'a' + given }}", True),
    ],
)
def test_a_template_that_joins_arguments_with_text_is_recognized(template: str, joins: bool) -> None:
    assert joins_arguments(Environment().parse(template)) == joins


@pytest.mark.parametrize("nested", [True, False])
def test_arguments_have_the_kind_that_the_template_expects(nested: bool) -> None:
    for given in (TEXT, OBJECT):
        assert with_arguments(turns(given, nested), as_text=False) == turns(OBJECT, nested)
        assert with_arguments(turns(given, nested), as_text=True) == turns(TEXT, nested)
    assert with_arguments(turns(""), as_text=False) == turns({})
    plain = [{"role": "assistant", "content": "Hi"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    assert with_arguments(plain, as_text=False) == plain


def test_a_template_that_compares_contents_gets_none_for_a_missing_one() -> None:
    source = """{%- for message in messages %}{%- for call in message.tool_calls or [] %}{{ call.function.name }};{%- endfor %}
        {%- if message['content'] is not none %}{{ '<' + message['content'] + '>' }}{%- endif %}{%- endfor %}"""
    template = ChatTemplate(source, {})
    assert (
        template.render(turns({}))
        == template.render([turns({})[0], {**turns({})[1], "content": None}])
        == "<Hi>weather;"
    )
    assert compares_content(Environment().parse("{% if m.content is none %}{% endif %}"))
    assert not compares_content(Environment().parse("{% if tools is none or m.content is string %}{% endif %}"))


@pytest.mark.parametrize("given", ["{", "[1]", "3", "[" * 5000])
def test_text_that_is_no_object_is_named(given: str) -> None:
    with pytest.raises(
        OptionFault, match=r"message 1: tool_calls\[0\].function.arguments is .*: expected the JSON text"
    ):
        with_arguments(turns(given), as_text=False)


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m['content'] | selectattr('a') %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% set parts = m['content'] %}{% for p in parts %}{{ p.text }}{% endfor %}", True),
        ("{% macro f(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}{{ f(m.content) }}", True),
        (
            "{% for m in messages %}{{ m['content'] | trim }}{% for c in m.calls %}{{ c }}{% endfor %}{% endfor %}",
            False,
        ),
        ("{% set content = m.content %}{{ content }}{% for m in messages[1:] %}{{ m.role }}{% endfor %}", False),
    ],
)
def test_it_is_known_which_templates_read_parts(template: str, reads: bool) -> None:
    assert reads_parts(Environment().parse(template)) == reads


def message(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, "name": "x"}


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": ""}, {"type": "text", "text": "two"}]
    tool = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    given = [message(parts), message("three"), message([]), tool]
    assert with_joined_parts(given) == [message("one\n\ntwo"), message("three"), message(""), tool]
    assert given[0]["content"] is parts


@pytest.mark.parametrize(
    "part",
    [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"type": "text", "text": 1}, {}, "text", None],
)
def test_another_part_is_refused_with_the_number_of_its_message(part: Any) -> None:
    with pytest.raises(OptionFault, match=r"message 1 has the part .*: expected \{'type': 'text', 'text': …\}"):
        with_joined_parts([message("a"), message([{"type": "text", "text": "b"}, part])])


FIRST = {"role": "user", "content": "a"}


def test_the_mark_is_behind_the_text_of_the_last_message() -> None:
    (first, last), mark = with_end_mark([FIRST, {"role": "assistant", "content": "b "}])
    assert first is FIRST
    assert last["content"] == f"b {mark}"
    assert cut_at_mark(f"<a><b {mark}>", mark) == "<a><b "
    assert cut_at_mark(f"<a><b {mark.strip()}>", mark) == "<a><b"
    parts = [{"type": "text", "text": "b"}, {"type": "image"}]
    (last,), mark = with_end_mark([{"role": "assistant", "content": parts}])
    assert last["content"] == [{"type": "text", "text": f"b{mark}"}, {"type": "image"}]
    assert parts[0]["text"] == "b"
    assert len({with_end_mark([FIRST])[1] for _ in range(20)}) == 20  # no text can contain it
    with pytest.raises(OptionFault, match="leaves out or changes the text of the last message"):
        cut_at_mark("<a>", mark)


@pytest.mark.parametrize(
    "last", [{"role": "assistant", "tool_calls": [{}]}, {"role": "assistant", "content": [{"type": "image"}]}]
)
def test_a_last_message_without_text_is_refused(last: dict[str, Any]) -> None:
    with pytest.raises(OptionFault, match="the last message has no text: expected a content to continue"):
        with_end_mark([FIRST, last])
