"""Chat formats: the chat templates of published models whose folders have none, and those that a folder has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from spaceport.exporter.sar_config import CheckpointError, read_json

# Each message begins with the token of its role and a line for metadata, which is empty here. The original code removes
# whitespace around answers before they become history.
CHATGLM3 = (
    "[gMASK]<sop>"
    "{%- for message in messages %}"
    "{{- '<|' + message['role'] + '|>\\n ' }}"
    "{{- message['content'] | trim if message['role'] == 'assistant' else message['content'] }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"
)

# ChatML with the default system message of Qwen-Chat.
CHATML = (
    "{%- if not messages or messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)

_PROBE = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Bye"},
)


def own_template(folder: Path, tokenizer: Any, published: str | None, renamed: Mapping[str, str]) -> str | None:
    """The chat template of a folder: its own, otherwise that of the published format.

    `renamed` has the texts that a template must have in place of published ones.
    """
    own = _in_folder(folder)
    if own is None:
        return published
    for old, new in renamed.items():
        own = own.replace(old, new)
    if published is not None and _rendered(folder, tokenizer, own) == _rendered(folder, tokenizer, published):
        return published  # the same format, which also removes whitespace around answers
    return own


def _in_folder(folder: Path) -> str | None:
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return file.read_text("utf-8")
    template = read_json(config).get("chat_template") if config.exists() else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{config}: chat_template is {template!r:.60}: expected text; save one as {file.name}")
    return template


def _rendered(folder: Path, tokenizer: Any, template: str) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            list(_PROBE), chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise CheckpointError(
            f"{folder}: its chat template cannot be rendered ({error}): expected a template for system, user and assistant"
        ) from error
    return text
