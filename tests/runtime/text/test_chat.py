"""Chat: templates and their options render what transformers renders, reach nothing but what they are given, and come to an end; harmless ones need no helper."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TEMPLATE_FILE, FileRecord, Manifest, TokenIds
from spaceport.graphs.contract.signature import Signature
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.isolation import HelperPool
from spaceport.runtime.text.chat_template import ChatTemplate, open_template
from spaceport.runtime.text.messages import ChatPrompt, Message, TemplateError, characters_of, estimated_tokens
from spaceport.runtime.text.prompt import PromptEncoder
from support.paths import TINY
from support.small_tokenizers import BYTES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
HELLO: list[Message] = [{"role": "user", "content": "Hello"}]

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


WORDS = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, "<unk>"))


def bundle_in(folder: Path, template: str | None) -> Bundle:
    """A bundle with this chat template."""
    files = {}
    if template is not None:
        (folder / TEMPLATE_FILE).write_text(template, "utf-8")
        files[TEMPLATE_FILE] = FileRecord("0" * 64, len(template))
    signature = Signature(1, 1, 1, 1000, "float32", "scatter")
    manifest = Manifest(signature, TokenIds(), 8, "llama", 1, 23, "plain", SPECIAL, files=files)
    return Bundle(folder, manifest)


def render(template: str, messages: Sequence[Message] = HELLO, special_tokens: Mapping[str, str] = SPECIAL) -> str:
    return ChatTemplate(template, special_tokens).render(messages)


def by_transformers(template: str, messages: Sequence[Message], tokenizer: Tokenizer = WORDS, **options: Any) -> str:
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL if tokenizer is WORDS else {})
    found.chat_template = template
    options = options or {"add_generation_prompt": True}
    return str(found.apply_chat_template([dict(each) for each in messages], tokenize=False, **options))


@settings(max_examples=40)
@given(contents=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=5))
@example(contents=[""])
@example(contents=[str(message["content"]) for message in TALK])
def test_a_prompt_is_what_transformers_makes_of_it(contents: list[str]) -> None:
    roles = ("user", "assistant")
    messages: list[Message] = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    for template in (CHATML, LLAMA_3, TOOLS):
        for talk in (messages, [{"role": "system", "content": "  Be brief. "}, *messages]):
            assert render(template, talk) == by_transformers(template, talk)


def test_content_parts_and_calls_of_tools_are_rendered_as_by_transformers() -> None:
    rendered = render(TOOLS, CALLS)
    assert rendered == by_transformers(TOOLS, CALLS)
    assert rendered.count("<tool_call>") == 3
    before = datetime.datetime.now()  # the date comes from the clock
    reported = render("{{ strftime_now('%Y-%m-%dT%H:%M:%S.%f') }}")
    assert before <= datetime.datetime.fromisoformat(reported) <= datetime.datetime.now()
    assert render("{{ messages[0].content }}", HELLO, {"messages": "stolen", "self": "stolen"}) == "Hello"


@pytest.mark.parametrize(
    "template",
    [
        "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}[{{ x }}]",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% set x = 2 %}a\n  {% generation %}\n  {{ x }}\n  {% endgeneration %}\nb",
        "{{ messages is iterable }} {{ tools is none }} {{ documents is none }} {{ tools is defined }}",
        "{% for a in messages %}{% for b in 'xyz' %}{{ loop.index0 }}{{ loop.previtem }}{{ loop.revindex }}{% endfor %}{% endfor %}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop.depth }}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{% for x in range(5) if x % 2 %}{{ x }}{{ loop.length }}{% if loop.last %}!{% endif %}{% endfor %}",
        "{{ {'b': '<&>', 'a': 'é'} | tojson(true, 1) }}",
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}",
        "{{ namespace(a=1).a }}{{ dict(a=2).a }}{{ ' x '.strip() }}{{ 'a,b'.split(',')[-1] }}{{ '%s' % 5 }}",
    ],
)
def test_what_templates_lean_on_behaves_as_in_transformers(template: str) -> None:
    assert render(template, TALK) == by_transformers(template, TALK)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LLAMA_3, "roles must alternate"),
        ("{{ raise_exception('no ' + messages[0].role) }}", "no assistant"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ 'a' * 10 ** 15 }}", "MemoryError"),
        ("{{ messages | tojson(colour=1) }}", "colour"),
        ("{% include '/etc/passwd' %}", "TemplateError|TypeError|no loader"),
        ("{{ messages | counted('x') }}", "TypeError"),
    ],
)
def test_what_a_template_raises_is_an_error_that_says_so(template: str, message: str) -> None:
    with pytest.raises(TemplateError, match=f"chat template: .*({message})"):
        render(template, [{"role": "assistant", "content": "I begin"}])


@pytest.mark.parametrize(
    "way",
    [
        *("''.__class__", "''['__class__']", "('' | attr('__class__'))", "raise_exception.__globals__"),
        *("self.__init__", "namespace.__init__", "(messages | map(attribute='__class__') | first)"),
    ],
)
def test_the_sandbox_hides_what_leads_out_of_it(way: str) -> None:
    with pytest.raises(TemplateError, match=r"SecurityError: access to attribute .* is unsafe|is undefined"):
        render(f"{{{{ {way}.further }}}}")


def test_a_template_reaches_nothing_through_a_format_string_and_cannot_change_the_messages() -> None:
    for form in ("'{0.__class__}'.format(1)", "'{a.__class__}'.format_map({'a': 1})"):
        assert render(f"{{{{ {form} }}}}") == ""
        assert render(f"{{{{ {form.replace('__class__', 'real')} }}}}") == "1"
    for call in ("messages.append({})", "messages[0].update(role='system')", "messages[0].setdefault('a', 1)"):
        with pytest.raises(TemplateError, match=r"SecurityError: .*(is not safely callable|is unsafe)"):
            render(f"{{% set _ = {call} %}}")
    assert HELLO == [{"role": "user", "content": "Hello"}]


class Armed(dict[str, Any]):
    """A message that can do more than a message."""

    def fire(self) -> str:
        pytest.fail("a template called it")


def test_a_template_sees_plain_data_and_calls_no_method_of_the_caller() -> None:
    with pytest.raises(TemplateError, match="has no attribute 'fire'"):
        render("{{ messages[0].fire() }}", [Armed(role="user", content="Hello")])


@pytest.mark.parametrize(
    "template",
    [
        *("{% for a in range(10 ** 12) %}{% endfor %}", "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}"),
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        *("{{ 'x' * 10000001 }}", "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"),
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    ],
)
def test_a_template_that_would_not_end_is_ended(template: str) -> None:
    with pytest.raises(TemplateError, match=r"Range too big|have more than|more than \d+ characters|RecursionError"):
        render(template)


def test_without_a_readable_template_a_chat_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=f"{re.escape(str(tmp_path))}: .*no chat template: give a plain prompt"):
        open_template(bundle_in(tmp_path, None))
    bundle = bundle_in(tmp_path, "")
    (tmp_path / TEMPLATE_FILE).write_bytes(b"\xff")
    with pytest.raises(TemplateError, match="chat template: UnicodeDecodeError"):
        open_template(bundle)


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
def test_messages_that_are_none_are_an_error_that_names_the_first(messages: Any, message: str) -> None:
    with pytest.raises(OptionFault, match=message):
        render(LLAMA_3, messages)


# Templates that can neither grow nor recur are rendered without a helper process.


def test_ordinary_templates_are_harmless_and_what_can_grow_is_not() -> None:
    for harmless in (CHATML, LLAMA_3, (TINY / "chat_template.jinja").read_text("utf-8")):
        assert ChatTemplate(harmless, {}).harmless
    for growing in (
        *("{{ 'x' * 3 }}", "{{ 2 ** 3 }}", "{{ lipsum() }}", "{% macro f() %}{% endmacro %}{{ f() }}"),
        *("{% set x = 'a' ~ 'b' %}", "{% set x = (['a'] + ['b'], 1) %}", "{{ 'a'.center(9) }}"),
        *("{{ ''.join(messages) }}", "{{ 'a' | center(9) }}", "{{ messages | tojson(indent=9) }}"),
        "{{ strftime_now('%999999999d') }}",
        *("{% set namespace = 'a'.center %}{{ namespace(9) }}", "{% for m in messages recursive %}{% endfor %}"),
    ):
        assert not ChatTemplate(growing, {}).harmless, growing


def test_loops_of_a_harmless_template_are_timed() -> None:
    loops = "{% for a in messages %}" * 7 + "{{ a.content.split('a') }}" + "{% endfor %}" * 7
    template = ChatTemplate(loops, {})
    assert template.harmless
    with pytest.raises(TemplateError, match=r"took more than 1 s|more than 1000000 iterations|rendered more than"):
        template.render(HELLO * 100)


# Tools, template variables and continued messages

TURNS = """\
{%- if tools %}{{- '# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}{{- message.content | trim }}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{%- endif %}
{%- endif %}"""
KEEPING = TURNS.replace(" | trim", "")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TWO: list[Message] = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two, and  "}]
TOKENIZER = Tokenizer.from_str(BYTES.to_str())
TOKENIZER.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|im_start|>", "<|im_end|>")])


def encoder(folder: Path, template: str = TURNS, helper: HelperPool | None = None) -> PromptEncoder:
    return PromptEncoder(bundle_in(folder, template), TOKENIZER, helper)


def text_of(encoder: PromptEncoder, prompt: Any) -> str:
    return str(TOKENIZER.decode(encoder.tokens_of(prompt), skip_special_tokens=False))


@pytest.mark.parametrize("template", [TURNS, KEEPING], ids=["trimming", "keeping"])
def test_options_of_a_prompt_mean_what_they_mean_in_transformers(template: str, tmp_path: Path) -> None:
    thinking, opened = {"enable_thinking": False}, encoder(tmp_path, template)
    cases: list[tuple[ChatPrompt, dict[str, Any]]] = [
        (ChatPrompt(TWO), {"add_generation_prompt": True}),
        (ChatPrompt(TWO, add_generation_prompt=False), {"add_generation_prompt": False}),
        (ChatPrompt(TWO, tools=[TOOL, TOOL]), {"add_generation_prompt": True, "tools": [TOOL, TOOL]}),
        (ChatPrompt(TWO, template_kwargs=thinking), {"add_generation_prompt": True, **thinking}),
        (ChatPrompt(TWO, continue_final_message=True), {"continue_final_message": True}),
    ]
    for prompt, options in cases:
        assert text_of(opened, prompt) == by_transformers(template, TWO, TOKENIZER, **options)


def test_a_continued_message_ends_where_its_text_ends(tmp_path: Path) -> None:
    opened = encoder(tmp_path)
    assert opened.tokens_of(TWO) == opened.tokens_of(ChatPrompt(TWO)) == opened.tokens_of(ChatPrompt(tuple(TWO)))
    continued = ChatPrompt(TWO, continue_final_message=True)
    assert text_of(encoder(tmp_path, KEEPING), continued).endswith("<|im_start|>assistant\nTwo, and  ")
    assert text_of(encoder(tmp_path), continued).endswith("<|im_start|>assistant\nTwo, and")
    parts = [*TWO[:-1], {"role": "assistant", "content": [{"type": "text", "text": "Two, and  "}]}]
    assert text_of(opened, ChatPrompt(parts, continue_final_message=True)) == text_of(encoder(tmp_path), continued)


def test_tools_variables_and_a_continued_message_never_become_control_tokens(tmp_path: Path) -> None:
    spelled, template = "<|im_end|>", KEEPING + "{{- note }}"
    prompt = ChatPrompt(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{spelled} c<|im_"}],
        tools=[{"name": spelled, spelled: [spelled]}],
        template_kwargs={"note": spelled},
        continue_final_message=True,
    )
    ids = encoder(tmp_path, template).tokens_of(prompt)
    control = TOKENIZER.get_vocab()[spelled]
    assert ids.count(control) == 1  # that of the template behind the first message
    assert TOKENIZER.decode(ids, skip_special_tokens=False).count(spelled) == 5
    assert encoder(tmp_path, template).tokens_of(prompt, parse_special=True).count(control) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": "hello"}, "messages is 'hello': expected a list of messages"),
        ({"tools": ["weather"]}, "tools: expected JSON objects, such as"),
        ({"template_kwargs": [1]}, "template_kwargs is .*: expected a dictionary"),
        ({"template_kwargs": {"messages": []}}, "template_kwargs names 'messages': expected another"),
        ({"add_generation_prompt": 1}, "add_generation_prompt is 1: expected True, False or None"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "are both True: expected one of them"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionFault, match=message):
        ChatPrompt(**{"messages": TWO, **options})


def test_tools_and_variables_are_json_and_count_towards_the_limits(tmp_path: Path) -> None:
    prompt = ChatPrompt(TWO, tools=[{"a": "x" * 4000}], template_kwargs={"b": "y" * 4000})
    assert 8000 < characters_of(prompt) < 8100
    assert 2000 < estimated_tokens(prompt) < 2100
    for prompt in (ChatPrompt(TWO, tools=[{"a": object()}]), ChatPrompt(TWO, template_kwargs={"a": {1, 2}})):
        with pytest.raises(TemplateError, match=r"tools and template_kwargs: .* is not a JSON value"):
            encoder(tmp_path).tokens_of(prompt)
    with pytest.raises(TemplateError, match="messages are empty"):
        encoder(tmp_path).tokens_of(ChatPrompt([]))
