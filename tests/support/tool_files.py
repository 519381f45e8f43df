"""Tool files: tokenizer and chat templates that render tools and calls as those of families of models do."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spaceport.graphs.contract.manifest import TEMPLATE_FILE, TOKENIZER_FILE
from spaceport.runtime.tool_calls.parser import MessagePart
from support.paths import DEMO

_HEAD = """\
{%- if tools %}{{- '<|start|>system\\n' }}{%- for tool in tools %}{{- tool.function | tojson }}{{- '\\n' }}{%- endfor %}
{{- '<|end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
"""
_TAIL = """
{{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"""
TEMPLATES = {
    "hermes": """\
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' }}{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{- '\\n</tool_call>' }}
{%- endfor %}""",
    "mistral": """\
{%- if message.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}{{- call.function | tojson }}{%- endfor %}{{- ']' }}{%- endif %}""",
    "llama3": """\
{%- set header = '<|start_header_id|>ipython' %}
{%- for call in message.tool_calls or [] %}
{{- '{"name": "' + call.function.name + '", "parameters": ' }}{{- call.function.arguments | tojson }}{{- '}' }}
{%- endfor %}""",
    "json": """\
{%- for call in message.tool_calls or [] %}{{- call.function.name + '(' + call.function.arguments + ')' }}{%- endfor %}""",
}


def tool_files(folder: Path, name: str) -> Path:
    """A new folder with the demo model's tokenizer and the template of a family; Mistral's calls begin with a special token."""
    folder.mkdir()
    (folder / TEMPLATE_FILE).write_text(_HEAD + TEMPLATES[name] + _TAIL, "utf-8")
    tokenizer: dict[str, Any] = json.loads((DEMO / TOKENIZER_FILE).read_text("utf-8"))
    if name == "mistral":
        tokenizer["model"]["merges"].pop()  # the one of the last token
        _, token = tokenizer["model"]["vocab"].popitem()
        tokenizer["model"]["vocab"]["[TOOL_CALLS]"] = token
        added = {**tokenizer["added_tokens"][0], "id": token, "content": "[TOOL_CALLS]"}
        tokenizer["added_tokens"] = sorted([*tokenizer["added_tokens"], added], key=lambda entry: int(entry["id"]))
    (folder / TOKENIZER_FILE).write_text(json.dumps(tokenizer), "utf-8")
    return folder


def joined(parts: Iterable[MessagePart]) -> tuple[str, list[tuple[str, str]]]:
    """The text among the parts, and the name and arguments of each call."""
    texts: list[str] = []
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif part.name is not None:
            calls.append((part.name, part.arguments))
        else:
            name, arguments = calls[part.index]
            calls[part.index] = name, arguments + part.arguments
    return "".join(texts), calls
