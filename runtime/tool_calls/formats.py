"""Formats: how families of models write calls of functions, and which one a chat template expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FormatName = Literal["hermes", "llama3", "mistral", "json"]


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls; each is a JSON object with the name of the function and its arguments."""

    name: FormatName
    opening: str  # before the calls; empty: they are the whole text
    closing: str = ""  # after the calls
    arguments: Literal["arguments", "parameters"] = "arguments"  # member of the object with the arguments
    starts: tuple[str, ...] = ("",)  # what a generated text may have before its first call, opening excluded
    between: str = ""  # what a generated text has between two calls
    end: str = ""  # what a generated text has after its last call
    prefix: str = ""  # what a text may have before its first call if `opening` is empty
    short_ids: bool = False  # whether templates expect ids of calls with nine characters


FORMATS: dict[FormatName, ToolFormat] = {
    "hermes": ToolFormat(  # also Qwen 2.5 and Qwen 3
        "hermes",
        "<tool_call>",
        "</tool_call>",
        starts=("\n",),
        between="\n</tool_call>\n<tool_call>\n",
        end="\n</tool_call>",
    ),
    "llama3": ToolFormat("llama3", "", arguments="parameters", between="; ", prefix="<|python_tag|>"),
    "mistral": ToolFormat("mistral", "[TOOL_CALLS]", starts=("[", " ["), between=", ", end="]", short_ids=True),
    "json": ToolFormat("json", "", starts=("[",), between=", ", end="]"),
}


def format_of(template: str) -> ToolFormat:
    """The format of the calls that a chat template renders; plain JSON if it is none of the known ones."""
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<tool_call>" in template and "<function=" not in template:
        return FORMATS["hermes"]
    if "<|start_header_id|>" in template and ("ipython" in template or "<|python_tag|>" in template):
        return FORMATS["llama3"]
    return FORMATS["json"]
