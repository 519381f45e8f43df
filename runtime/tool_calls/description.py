"""Description: the functions and how to call them as a system message, for chat templates that do not render tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from spaceport.runtime.tool_calls.formats import ToolFormat

_WORD = re.compile(r"\btools\b")


def renders_tools(template: str) -> bool:
    """Whether a chat template has anything to do with tools."""
    return _WORD.search(template) is not None


def with_description(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat
) -> list[Mapping[str, Any]]:
    """Messages whose system message describes the functions and how to call them."""
    text = _description(tools, tool_format)
    first = messages[0] if messages else {}
    if first.get("role") == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _description(tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    functions = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    call = f'{{"name": "NAME", "{tool_format.arguments}": {{ARGUMENTS}}}}'
    example = f"{tool_format.opening}{tool_format.starts[0]}{call}{tool_format.end}"
    return (
        f"You can call these functions, which are described by JSON schemas:\n{functions}\n\n"
        f"To call functions, answer with nothing but:\n{example}"
    )
