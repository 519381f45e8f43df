"""Tool bundle: the demo model with a chat template that renders tools and calls, as those of other families do."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

from spaceport.graphs.contract.manifest import TEMPLATE_FILE, TOKENIZER_FILE
from support.small_bundle import edit

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


def tool_bundle(bundle: Path, copy: Path, name: str) -> Path:
    """A copy of the demo bundle with the chat template of a family; Mistral's calls begin with a special token."""
    shutil.copytree(bundle, copy)
    _replace(copy, TEMPLATE_FILE, _HEAD + TEMPLATES[name] + _TAIL)
    if name == "mistral":
        tokenizer: dict[str, Any] = json.loads((copy / TOKENIZER_FILE).read_text("utf-8"))
        tokenizer["model"]["merges"].pop()  # the one of the last token
        word, token = tokenizer["model"]["vocab"].popitem()
        tokenizer["model"]["vocab"]["[TOOL_CALLS]"] = token
        added = {**tokenizer["added_tokens"][0], "id": token, "content": "[TOOL_CALLS]"}
        tokenizer["added_tokens"] = sorted([*tokenizer["added_tokens"], added], key=lambda entry: int(entry["id"]))
        assert word
        _replace(copy, TOKENIZER_FILE, json.dumps(tokenizer))
    return copy


def _replace(bundle: Path, file: str, text: str) -> None:
    content = text.encode()
    (bundle / file).write_bytes(content)
    record = {"sha256": sha256(content).hexdigest(), "size": len(content)}
    edit(bundle, lambda entries: entries["files"].update({file: record}))
