"""Content parts: a template that expects text gets text, and one that reads parts gets parts."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import Environment

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.text.content_parts import reads_parts, with_joined_parts

PARTS = [
    "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for p in m.content | selectattr('type', 'eq', 'text') %}{{ p.text }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set parts = m['content'] %}{% for p in parts %}{{ p.text }}{% endfor %}{% endfor %}",
    "{% macro show(content) %}{% for p in content %}{{ p.text }}{% endfor %}{% endmacro %}{{ show(messages[0].content) }}",
]
TEXT = [
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m['content'] | trim }}{% for call in m.tool_calls %}{{ call }}{% endfor %}{% endfor %}",
    "{% set content = messages[0].content %}{{ content }}{% for m in messages[1:] %}{{ m.role }}{% endfor %}",
]


@pytest.mark.parametrize("template", [*PARTS, *TEXT])
def test_it_is_known_which_templates_read_parts(template: str) -> None:
    assert reads_parts(Environment().parse(template)) == (template in PARTS)


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
