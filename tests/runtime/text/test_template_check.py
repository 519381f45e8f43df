"""Template check: ordinary chat templates are harmless, and nothing that can grow or recur is."""

from __future__ import annotations

import pytest

from spaceport.runtime.text.chat import ChatTemplate, Message, TemplateError
from support.paths import TINY

CHATML = """\
{% for message in messages %}{% if loop.first and message.role != 'system' %}
{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}
{{- '<|im_start|>' + message.role + '\n' + message['content'] | trim + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA_3 = """\
{{- bos_token }}{%- if not date is defined %}{%- set date = strftime_now('%d %b %Y') %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{%- endif %}{{ date }}
{%- for message in messages %}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate') }}{%- endif -%}{{ message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"""

HELLO: list[Message] = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("template", [CHATML, LLAMA_3, (TINY / "chat_template.jinja").read_text("utf-8")])
def test_ordinary_templates_are_harmless(template: str) -> None:
    assert ChatTemplate(template, {}).harmless


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 3 }}",
        "{{ 2 ** 3 }}",
        "{{ messages[0].content % 3 }}",
        "{{ lipsum() }}",
        "{{ range(9) | list }}",
        "{% macro f() %}{% endmacro %}{{ f() }}",
        "{% set x = 'a' ~ 'b' %}",
        "{% set x = (['a'] + ['b'], 1) %}",
        "{% set x %}a{% endset %}",
        "{{ 'a'.center(9) }}",
        "{{ ''.join(messages) }}",
        "{{ 'a' | center(9) }}",
        "{{ messages | tojson(indent=9) }}",
        "{{ strftime_now('%999999999d') }}",
        "{% set namespace = 'a'.center %}{{ namespace(9) }}",
        "{{ messages['a']('b') }}",
        "{% for m in messages recursive %}{% endfor %}",
    ],
)
def test_what_can_grow_is_not_harmless(template: str) -> None:
    assert not ChatTemplate(template, {}).harmless


def test_loops_of_a_harmless_template_are_timed() -> None:
    loops = "{% for a in messages %}" * 7 + "{{ a.content.split('a') }}" + "{% endfor %}" * 7
    template = ChatTemplate(loops, {})
    assert template.harmless
    with pytest.raises(TemplateError, match=r"took more than 1 s|more than 1000000 iterations|rendered more than"):
        template.render(HELLO * 100)
