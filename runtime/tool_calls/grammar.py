"""Grammar of calls: has a completion consist of calls of some functions, in the format of the model."""

from __future__ import annotations

import json
from collections.abc import Sequence

from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.tool_calls.formats import ToolFormat
from spaceport.runtime.tool_calls.functions import Function

_MOST_CALLS = 16  # of one text: a weak model would go on until its limit


def calls_grammar(tool_format: ToolFormat, functions: Sequence[Function], *, parallel: bool, opened: bool) -> Grammar:
    """A grammar for one call of one of these functions, or with `parallel` for several.

    `opened` is whether the prompt ends with the opening of the format.
    """
    opening = "" if opened else tool_format.opening
    starts = " | ".join(json.dumps(opening + start) for start in tool_format.starts)
    more = f"({json.dumps(tool_format.between)} call){{0,{_MOST_CALLS - 1}}}" if parallel else ""
    end = json.dumps(tool_format.end) if tool_format.end else ""
    heads = [f'{{"name": {json.dumps(one.name)}, "{tool_format.arguments}": ' for one in functions]
    calls = " | ".join(f'{json.dumps(head)} arguments{index} "}}"' for index, head in enumerate(heads))
    rules = f"start: begin call {more} {end}\nbegin: {starts}\ncall: {calls}"
    return Grammar(
        lark=rules,
        schemas={f"arguments{index}": one.schema for index, one in enumerate(functions)},
        name="the grammar of tools",
    )
