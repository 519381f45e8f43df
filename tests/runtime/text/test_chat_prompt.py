"""Chat prompt: tools, template variables and continued messages are rendered as by transformers, and stay text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TEMPLATE_FILE, FileRecord, Manifest, TokenIds
from spaceport.graphs.contract.signature import Signature
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.isolation.pool import HelperPool
from spaceport.runtime.text.chat import TemplateError
from spaceport.runtime.text.chat_prompt import ChatPrompt, Message
from spaceport.runtime.text.prompt import PromptEncoder
from spaceport.runtime.text.prompt_size import characters_of, estimated_tokens
from support.small_tokenizers import BYTES

TEMPLATE = """\
{%- if tools %}{{- '# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}{{- message.content | trim }}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{%- endif %}
{%- endif %}"""
KEEPING = TEMPLATE.replace(" | trim", "")
ISOLATED = "{%- macro nothing() %}{%- endmacro %}" + TEMPLATE
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TALK: list[Message] = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two, and  "}]


def tokenizer() -> Tokenizer:
    found = Tokenizer.from_str(BYTES.to_str())
    found.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|im_start|>", "<|im_end|>")])
    return found


TOKENIZER = tokenizer()


def encoder(folder: Path, template: str = TEMPLATE, helper: HelperPool | None = None) -> PromptEncoder:
    (folder / TEMPLATE_FILE).write_text(template, "utf-8")
    signature = Signature(1, 1, 1, TOKENIZER.get_vocab_size(), "float32", "scatter")
    files = {TEMPLATE_FILE: FileRecord("0" * 64, len(template))}
    manifest = Manifest(signature, TokenIds(), 0, 64, "llama", 1, 23, "plain", files=files)
    return PromptEncoder(Bundle(folder, manifest), TOKENIZER, helper)


def text_of(encoder: PromptEncoder, prompt: Any) -> str:
    return str(TOKENIZER.decode(encoder.tokens_of(prompt), skip_special_tokens=False))


def by_transformers(messages: list[Message], template: str = TEMPLATE, **options: Any) -> str:
    found = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER)
    found.chat_template = template
    return str(found.apply_chat_template([dict(each) for each in messages], tokenize=False, **options))


@pytest.mark.parametrize("template", [TEMPLATE, KEEPING], ids=["trimming", "keeping"])
@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (ChatPrompt(TALK), {"add_generation_prompt": True}),
        (ChatPrompt(TALK, add_generation_prompt=False), {}),
        (ChatPrompt(TALK, tools=[TOOL, TOOL]), {"add_generation_prompt": True, "tools": [TOOL, TOOL]}),
        (
            ChatPrompt(TALK, template_kwargs={"enable_thinking": False}),
            {"add_generation_prompt": True, "enable_thinking": False},
        ),
        (ChatPrompt(TALK, continue_final_message=True), {"continue_final_message": True}),
    ],
)
def test_a_prompt_is_what_transformers_makes_of_it(
    prompt: ChatPrompt, options: dict[str, Any], template: str, tmp_path: Path
) -> None:
    assert text_of(encoder(tmp_path, template), prompt) == by_transformers(TALK, template, **options)


@pytest.mark.slow
def test_the_helper_process_gets_the_same_variables(tmp_path: Path) -> None:
    prompt = ChatPrompt(TALK, tools=[TOOL], template_kwargs={"enable_thinking": False})
    helper = HelperPool(processes=1)
    try:
        opened = encoder(tmp_path, ISOLATED, helper)
        assert opened.template.isolates
        assert text_of(opened, prompt) == text_of(encoder(tmp_path), prompt)
    finally:
        helper.close()


def test_a_continued_message_ends_where_its_text_ends(tmp_path: Path) -> None:
    opened = encoder(tmp_path)
    assert opened.tokens_of(TALK) == opened.tokens_of(ChatPrompt(TALK)) == opened.tokens_of(ChatPrompt(tuple(TALK)))
    continued = ChatPrompt(TALK, continue_final_message=True)
    assert text_of(encoder(tmp_path, KEEPING), continued).endswith("<|im_start|>assistant\nTwo, and  ")
    assert text_of(encoder(tmp_path), continued).endswith("<|im_start|>assistant\nTwo, and")
    parts = [*TALK[:-1], {"role": "assistant", "content": [{"type": "text", "text": "Two, and  "}]}]
    assert text_of(encoder(tmp_path), ChatPrompt(parts, continue_final_message=True)) == text_of(
        encoder(tmp_path), continued
    )


def test_tools_variables_and_a_continued_message_never_become_control_tokens(tmp_path: Path) -> None:
    spelled, template = "<|im_end|>", KEEPING + "{{- note }}"
    prompt = ChatPrompt(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{spelled} c<|im_"}],
        tools=[{"name": spelled, spelled: [spelled]}],
        template_kwargs={"note": spelled},
        continue_final_message=True,
    )
    ids = encoder(tmp_path, template).tokens_of(prompt)
    control = TOKENIZER.token_to_id(spelled)
    assert ids.count(control) == 1  # that of the template behind the first message
    assert TOKENIZER.decode(ids, skip_special_tokens=False).count(spelled) == 5
    assert encoder(tmp_path, template).tokens_of(prompt, parse_special=True).count(control) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": "hello"}, "messages is 'hello': expected a list of messages"),
        ({"messages": TALK, "tools": "weather"}, "tools is 'weather': expected a list of JSON objects"),
        ({"messages": TALK, "tools": ["weather"]}, "tools: expected JSON objects, such as"),
        ({"messages": TALK, "template_kwargs": [1]}, "template_kwargs is .*: expected a dictionary"),
        ({"messages": TALK, "template_kwargs": {"messages": []}}, "template_kwargs names 'messages': expected another"),
        ({"messages": TALK, "template_kwargs": {1: 2}}, "template_kwargs names 1: expected another"),
        ({"messages": TALK, "add_generation_prompt": 1}, "add_generation_prompt is 1: expected True, False or None"),
        (
            {"messages": TALK, "add_generation_prompt": True, "continue_final_message": True},
            "are both True: expected one of them",
        ),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionFault, match=message):
        ChatPrompt(**options)


def test_what_is_not_json_is_refused(tmp_path: Path) -> None:
    for prompt in (ChatPrompt(TALK, tools=[{"a": object()}]), ChatPrompt(TALK, template_kwargs={"a": {1, 2}})):
        with pytest.raises(TemplateError, match=r"tools and template_kwargs: .* is not a JSON value"):
            encoder(tmp_path).tokens_of(prompt)
    with pytest.raises(TemplateError, match="messages are empty"):
        encoder(tmp_path).tokens_of(ChatPrompt([]))


def test_tools_and_variables_count_towards_the_limits() -> None:
    prompt = ChatPrompt(TALK, tools=[{"a": "x" * 4000}], template_kwargs={"b": "y" * 4000})
    assert 8000 < characters_of(prompt) < 8100
    assert 2000 < estimated_tokens(prompt) < 2100
