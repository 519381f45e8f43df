"""Grammar: a regular expression or a JSON schema that a completion matches."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spaceport.graphs.contract.faults import OptionFault

# Whitespace between JSON tokens: none, a space, or a line break with indentation. If all whitespace were allowed, a weak
# model could generate whitespace for ever.
_SPACE = r" |\n {0,20}"
# Without this option llguidance forces tokens wherever the grammar allows only one continuation. It would force special
# tokens with the same spelling, and characters outside the grammar where the tokenizer normalizes text.
_OPTIONS = '%llguidance {"no_forcing": true}'
_EXAMPLE = '{"type": "object", "properties": {"name": {"type": "string"}}}'
# Keywords of JSON schemas whose conditions are intersected, which may take exponential time.
_INTERSECTIONS = frozenset(
    (
        "allOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "patternProperties",
        "propertyNames",
        "dependentSchemas",
        "contains",
    )
)
_TEXT_RULES = frozenset(("pattern", "format", "minLength", "maxLength"))
MOST_SHOWN = 60  # characters of a grammar or a text in an error message


@dataclass(frozen=True)
class Grammar:
    """A regular expression or a JSON schema that the whole completion matches; give exactly one of them.

    - `regex`: Regular expression in the syntax of Rust's regex crate: no look-around, no back-references.
    - `json_schema`: JSON schema as a string or a mapping; properties are generated in the schema's order.
    """

    regex: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    source: str = field(init=False, repr=False)  # the grammar in llguidance's syntax
    label: str = field(init=False, repr=False)  # the grammar as error messages name it
    depth: int = field(init=False, repr=False)  # nested groups of the expression, or objects and arrays of the schema

    def __post_init__(self) -> None:
        if (self.regex is None) == (self.json_schema is None):
            raise OptionFault("regex and json_schema are both given, or neither is: expected one of the two")
        schema: dict[str, Any] = {}
        if self.regex is not None:
            rule, label = _rule_of(self.regex), f"the regular expression {_shown(self.regex)}"
        else:
            schema = _schema_of(self.json_schema)
            rule = "start: %json " + json.dumps({"x-guidance": {"whitespace_pattern": _SPACE}, **schema})
            label = f"the JSON schema {_shown(json.dumps(schema))}"
        object.__setattr__(self, "source", f"{_OPTIONS}\n{rule}")
        object.__setattr__(self, "label", label)
        text = self.regex if self.regex is not None else json.dumps(schema)
        object.__setattr__(self, "depth", _depth(text, "(" if self.regex is not None else "{["))


def _rule_of(regex: str) -> str:
    if not isinstance(regex, str) or not regex:
        raise OptionFault(f"regex is {regex!r}: expected a regular expression of at least one character")
    signs = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}  # a rule is one line, and an unescaped / ends its expression
    escaped = re.sub(r"\\.|/|\n", lambda found: signs.get(found[0], found[0]), regex, flags=re.DOTALL)
    return f"start: TEXT\nTEXT: /{escaped}/"


def _schema_of(given: object) -> dict[str, Any]:
    try:
        plain = dict(given) if isinstance(given, Mapping) else given
        schema = json.loads(plain if isinstance(plain, str) else json.dumps(plain, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionFault(f"json_schema is not JSON: {error}: expected a schema such as {_EXAMPLE}") from error
    if not isinstance(schema, dict):
        raise OptionFault(f"json_schema is {_shown(json.dumps(schema))}: expected an object such as {_EXAMPLE}")
    return schema


def _depth(text: str, opening: str) -> int:
    """The deepest nesting of brackets in a text, an upper bound that also counts those that are quoted."""
    closing = opening.translate({ord("("): ")", ord("{"): "}", ord("["): "]"})
    depth = deepest = 0
    for sign in re.findall(f"[{re.escape(opening + closing)}]", text):
        depth = depth + 1 if sign in opening else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _shown(text: str) -> str:
    return repr(text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 1] + "…")


def is_simple(grammar: Grammar) -> bool:
    """Whether a grammar compiles soon: llguidance limits expressions, but not the intersections of JSON schemas."""
    if grammar.regex is not None:
        return True
    waiting: list[Any] = [json.loads(grammar.source.partition("%json ")[2])]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict):
            if not _INTERSECTIONS.isdisjoint(schema) or len(_TEXT_RULES.intersection(schema)) > 1:
                return False
            waiting += schema.values()
        elif isinstance(schema, list):
            waiting += schema
    return True
