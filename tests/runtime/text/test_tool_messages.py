"""Tool messages: templates get arguments of calls as objects, or as text if they join them with text."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.text.chat import ChatTemplate
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
    assert joins_arguments(jinja2.Environment().parse(template)) == joins


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("given", [TEXT, OBJECT])
def test_arguments_have_the_kind_that_the_template_expects(given: object, nested: bool) -> None:
    assert with_arguments(turns(given, nested), as_text=False) == turns(OBJECT, nested)
    assert with_arguments(turns(given, nested), as_text=True) == turns(TEXT, nested)


def test_a_template_that_compares_contents_gets_none_for_a_missing_one() -> None:
    source = """{%- for message in messages %}{%- for call in message.tool_calls or [] %}{{ call.function.name }};{%- endfor %}
        {%- if message['content'] is not none %}{{ '<' + message['content'] + '>' }}{%- endif %}{%- endfor %}"""
    template = ChatTemplate(source, {})
    assert (
        template.render(turns({}))
        == template.render([turns({})[0], {**turns({})[1], "content": None}])
        == "<Hi>weather;"
    )
    assert compares_content(jinja2.Environment().parse("{% if m.content is none %}{% endif %}"))
    assert not compares_content(jinja2.Environment().parse("{% if tools is none or m.content is string %}{% endif %}"))


def test_no_arguments_are_an_empty_object() -> None:
    assert with_arguments(turns(""), as_text=False) == turns({})
    plain = [{"role": "assistant", "content": "Hi"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    assert with_arguments(plain, as_text=False) == plain


@pytest.mark.parametrize("given", ["{", "[1]", "3", "[" * 5000])
def test_text_that_is_no_object_is_named(given: str) -> None:
    with pytest.raises(
        OptionFault, match=r"message 1: tool_calls\[0\].function.arguments is .*: expected the JSON text"
    ):
        with_arguments(turns(given), as_text=False)
