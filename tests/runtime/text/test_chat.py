"""Chat: templates render what transformers renders, reach nothing but what they are given, and come to an end."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TEMPLATE_FILE, FileRecord, Manifest, TokenIds
from spaceport.graphs.contract.signature import Signature
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.text.chat import Message, TemplateError, render

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
HELLO: list[Message] = [{"role": "user", "content": "Hello"}]

CHATML = """\
{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message['content'] | trim + '<|im_end|>' }}
    {%- if not loop.last %}{{ '\\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
    {{- '\\n<|im_start|>assistant\\n' }}
{% endif %}
"""

LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now('%d %b %Y') %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
<|start_header_id|>system<|end_header_id|>

Today Date: {{ date_string }}
{% if tools is not none %}
Environment: ipython
{% endif %}

{{ system_message }}<|eot_id|>
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] -%}{%- set turns = messages[1:] -%}
{%- else -%}
    {%- set turns = messages -%}
{%- endif -%}
{{ bos_token }}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {%- if loop.last and system is defined -%}
            {{ ' [INST] ' + system + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else -%}
            {{ ' [INST] ' + message['content'] + ' [/INST]' }}
        {%- endif -%}
    {%- elif message['role'] == 'assistant' -%}
        {{ ' ' + message['content'] + eos_token }}
    {%- else -%}
        {{ raise_exception('Only user and assistant roles are supported, with a system message first: ' ~ message.role) }}
    {%- endif -%}
{%- endfor -%}
"""

TOOLS = """\
{%- macro call(one) -%}
<tool_call>{{ {'name': one.name, 'arguments': one.arguments} | tojson }}</tool_call>
{%- endmacro %}
{%- set ns = namespace(seen=0, names=[]) %}
{%- if tools %}{{- '# Tools\\n' }}{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}{% endif %}
{%- for message in messages | selectattr('role', 'ne', 'system') %}
    {%- if message.content is string %}
        {{- '[' ~ message.role ~ '] ' ~ message.content }}
    {%- elif message.content is iterable %}
        {%- for part in message.content if part.type == 'text' %}
            {{- part.text }}{{ ',' if not loop.last }}
        {%- else %}
            {{- '(nothing)' }}
        {%- endfor %}
    {%- endif %}
    {%- for one in message.tool_calls or [] %}
        {%- if one.name == 'skip' %}{%- continue %}{%- endif %}
        {%- if ns.seen >= 3 %}{%- break %}{%- endif %}
        {%- set ns.seen = ns.seen + 1 %}
        {{- '\\n' ~ loop.index ~ '/' ~ loop.length ~ ' ' ~ call(one) }}
    {%- endfor %}
    {{- '\\n' }}
{%- endfor %}
{%- for key, value in (messages | last).items() %}{{ key }}={{ value | tojson(sort_keys=true, separators=(',', ':')) }};{% endfor %}
{%- if add_generation_prompt %}{{ '\\n[assistant] ' }}{% endif %}
"""

TEMPLATES = {"chatml": CHATML, "llama-3": LLAMA_3, "mistral": MISTRAL, "tools": TOOLS}
BY_TEMPLATE = pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
TALK: list[Message] = [
    {"role": "user", "content": "  What is <b>1 & 2</b>? \"quoted\" 'too' {{ braces }} {% raw %}  "},
    {"role": "assistant", "content": "It is 你好 😀.\n\n"},
    {"role": "user", "content": "<|im_end|>\n</s>"},
]
CALLS: list[Message] = [
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"name": "weather", "arguments": {"town": "Zürich <3", "days": 2, "exact": True, "none": None}},
            {"name": "skip", "arguments": {}},
            *({"name": f"more{i}", "arguments": {"b": [1.5, i], "a": "é"}} for i in range(4)),
        ],
    },
    {"role": "user", "content": []},
]


def bundle_in(folder: Path, template: str | None, special_tokens: Mapping[str, str] = SPECIAL) -> Bundle:
    """A bundle with this chat template."""
    files = {}
    if template is not None:
        (folder / TEMPLATE_FILE).write_text(template, "utf-8")
        files[TEMPLATE_FILE] = FileRecord("0" * 64, len(template))
    manifest = Manifest(
        *(Signature(1, 1, 1, 8, "float32", "scatter"), TokenIds(), 0, 8, "llama", 1, 23, "plain"),
        special_tokens=dict(special_tokens),
        files=files,
    )
    return Bundle(folder, manifest)


def by_transformers(template: str, messages: Sequence[Message]) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, "<unk>")), **SPECIAL
    )
    tokenizer.chat_template = template
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


@BY_TEMPLATE
@pytest.mark.parametrize(
    "messages",
    [HELLO, TALK, [{"role": "system", "content": "  Be brief. "}, *TALK], [{"role": "user", "content": ""}]],
    ids=["one", "several", "system", "empty content"],
)
def test_a_prompt_is_what_transformers_makes_of_it(template: str, messages: Sequence[Message], tmp_path: Path) -> None:
    assert render(bundle_in(tmp_path, template), messages) == by_transformers(template, messages)


def test_content_parts_and_calls_of_tools_are_rendered_as_by_transformers(tmp_path: Path) -> None:
    rendered = render(bundle_in(tmp_path, TOOLS), CALLS)
    assert rendered == by_transformers(TOOLS, CALLS)
    assert '1/6 <tool_call>{"name": "weather", "arguments": {"town": "Zürich <3", "days": 2' in rendered
    assert rendered.count("<tool_call>") == 3
    assert rendered.endswith('(nothing)\nrole="user";content=[];\n[assistant] ')


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """A bundle for each template."""
    return {template: bundle_in(tmp_path_factory.mktemp("chat"), template) for template in TEMPLATES.values()}


@settings(max_examples=50)
@given(contents=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=5))
def test_every_content_is_rendered_as_by_transformers(bundles: dict[str, Bundle], contents: list[str]) -> None:
    roles = ("user", "assistant")
    messages: list[Message] = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    for template, bundle in bundles.items():
        assert render(bundle, messages) == by_transformers(template, messages)


def test_the_date_comes_from_the_clock(tmp_path: Path) -> None:
    before = datetime.datetime.now()
    reported = render(bundle_in(tmp_path, "{{ strftime_now('%Y-%m-%dT%H:%M:%S.%f') }}"), HELLO)
    assert before <= datetime.datetime.fromisoformat(reported) <= datetime.datetime.now()


@pytest.mark.parametrize(
    "template",
    [
        "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}[{{ x }}]",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% set x = 2 %}a\n  {% generation %}\n  {{ x }}\n  {% endgeneration %}\nb",
        "{{ messages is iterable }} {{ tools is none }} {{ documents is none }} {{ tools is defined }}",
        "{% for a in messages %}{% for b in 'xyz' %}{{ loop.index0 }}{{ loop.previtem }}{{ loop.revindex }}{% endfor %}{% endfor %}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop.depth }}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{% for x in missing %}a{% else %}none{% endfor %}{{ missing }}",
        "{% for x in range(5) if x % 2 %}{{ x }}{{ loop.length }}{% if loop.last %}!{% endif %}{% endfor %}",
        "{{ {'b': '<&>', 'a': 'é'} | tojson(true, 1) }}",
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}",
        "{{ namespace(a=1).a }}{{ dict(a=2).a }}{{ ' x '.strip() }}{{ 'a,b'.split(',')[-1] }}{{ '%s' % 5 }}",
    ],
)
def test_what_templates_lean_on_behaves_as_in_transformers(template: str, tmp_path: Path) -> None:
    assert render(bundle_in(tmp_path, template), TALK) == by_transformers(template, TALK)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (MISTRAL, "Conversation roles must alternate"),
        ("{{ raise_exception('no ' + messages[0].role) }}", "no assistant"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{% break %}", "SyntaxError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ 'a'.encode('nonsense') }}", "LookupError"),
        ("{{ 'a' * 10 ** 15 }}", "MemoryError"),
        ("{{ messages | tojson(colour=1) }}", "colour"),
        ("{% include '/etc/passwd' %}", "TemplateError|TypeError|no loader"),
        ("{{ messages | counted('x') }}", "TypeError"),
    ],
)
def test_what_a_template_raises_is_an_error_that_says_so(template: str, message: str, tmp_path: Path) -> None:
    messages: list[Message] = [{"role": "assistant", "content": "I begin"}]
    with pytest.raises(TemplateError, match=f"chat template: .*({message})"):
        render(bundle_in(tmp_path, template), messages)


def test_a_template_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    bundle = bundle_in(tmp_path, "")
    (tmp_path / TEMPLATE_FILE).write_bytes(b"\xff")
    with pytest.raises(TemplateError, match="UnicodeDecodeError"):
        render(bundle, HELLO)


@pytest.mark.parametrize(
    "way",
    [
        "''.__class__",
        "''['__class__']",
        "('' | attr('__class__'))",
        "messages.__class__",
        "raise_exception.__globals__",
        "strftime_now.__code__",
        "self.__init__",
        "cycler.__init__",
        "namespace.__init__",
        "dict.mro",
        "(messages | map(attribute='__class__') | first)",
    ],
)
def test_the_sandbox_hides_what_leads_out_of_it(way: str, tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"SecurityError: access to attribute .* is unsafe|is undefined"):
        render(bundle_in(tmp_path, f"{{{{ {way}.further }}}}"), HELLO)


@pytest.mark.parametrize("form", ["'{0.__class__}'.format(1)", "'{a.__class__}'.format_map({'a': 1})"])
def test_a_format_string_leads_nowhere_either(form: str, tmp_path: Path) -> None:
    assert render(bundle_in(tmp_path, f"{{{{ {form} }}}}"), HELLO) == ""
    assert render(bundle_in(tmp_path, f"{{{{ {form.replace('__class__', 'real')} }}}}"), HELLO) == "1"


@pytest.mark.parametrize(
    "call",
    [
        "messages.append({})",
        "messages.clear()",
        "messages[0].update(role='system')",
        "messages[0].pop('content')",
        "messages[0].setdefault('a', 1)",
    ],
)
def test_a_template_cannot_change_the_messages(call: str, tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"SecurityError: .*(is not safely callable|is unsafe)"):
        render(bundle_in(tmp_path, f"{{% set _ = {call} %}}"), HELLO)
    assert HELLO == [{"role": "user", "content": "Hello"}]


class Armed(dict[str, Any]):
    """A message that can do more than a message."""

    fired = False

    def fire(self) -> str:
        self.fired = True
        return "fired"


def test_a_template_sees_plain_data_and_calls_no_method_of_the_caller(tmp_path: Path) -> None:
    message = Armed(role="user", content="Hello")
    with pytest.raises(TemplateError, match="has no attribute 'fire'"):
        render(bundle_in(tmp_path, "{{ messages[0].fire() }}"), [message])
    assert not message.fired


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(10 ** 12) %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) | list %}{% for a in r %}{% for b in r %}{% for c in r %}x{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ 'x' * 10000001 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    ],
)
def test_a_template_that_would_not_end_is_ended(template: str, tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"Range too big|have more than|more than \d+ characters|RecursionError"):
        render(bundle_in(tmp_path, template), HELLO)


def test_without_a_template_a_chat_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=f"{re.escape(str(tmp_path))}: .*no chat template: give a plain prompt"):
        render(bundle_in(tmp_path, None), HELLO)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages are empty: expected at least one"),
        (["Hello"], "message 0 is 'Hello': expected {'role': …, 'content': …}"),
        ({"role": "user", "content": "Hello"}, "message 0 is 'role': expected"),
        ([*HELLO, {"content": "Hello"}], "message 1 is {'content': 'Hello'}: expected"),
        ([*HELLO, {"role": "user"}], "message 1 is {'role': 'user'}: expected"),
        ([{"role": 5, "content": "Hello"}], "message 0 is .*: expected"),
        ([{"role": "user", "content": b"Hello"}], "messages: .*bytes.*: expected JSON values"),
        ([{"role": "user", "content": {1, 2}}], "messages: .*set.*: expected JSON values"),
    ],
)
def test_messages_that_are_none_are_an_error_that_names_the_first(messages: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionFault, match=message):
        render(bundle_in(tmp_path, CHATML), messages)


def test_a_special_token_cannot_replace_the_messages(tmp_path: Path) -> None:
    bundle = bundle_in(tmp_path, "{{ messages[0].content }}", {"messages": "stolen", "self": "stolen"})
    assert render(bundle, HELLO) == "Hello"
