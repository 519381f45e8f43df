"""A regular expression, a JSON schema or a context-free grammar that a completion matches."""

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
        *("allOf", "oneOf", "not", "if", "then", "else"),
        *("patternProperties", "propertyNames", "dependentSchemas", "contains"),
    )
)
_TEXT_RULES = frozenset(("pattern", "format", "minLength", "maxLength"))
_QUOTED = re.compile(r'"(\\.|[^"\\])*"')
_COSTLY = frozenset("/&~%")  # of rules: expressions, intersections, complements and directives
MOST_SHOWN = 60  # characters of a grammar or a text in an error message


@dataclass(frozen=True)
class Grammar:
    """What the whole completion matches: a regular expression, a JSON schema or a context-free grammar; give one of them.

    - `regex`: Regular expression in the syntax of Rust's regex crate: no look-around, no back-references.
    - `json_schema`: JSON schema as a string or a mapping; properties are generated in the schema's order.
    - `lark`: Context-free grammar in llguidance's dialect of Lark; its first rule is `start`.
    - `schemas`: JSON schema of each name that the rules of `lark` use without defining it.
    - `name`: What error messages call the grammar; default: its beginning.
    """

    regex: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    lark: str | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    name: str = ""
    source: str = field(init=False, repr=False)  # the grammar in llguidance's syntax
    label: str = field(init=False, repr=False)  # the grammar as error messages name it
    depth: int = field(init=False, repr=False)  # nested groups of the expression, or objects and arrays of the schema

    def __post_init__(self) -> None:
        kinds = sum(option is not None for option in (self.regex, self.json_schema, self.lark))
        if kinds != 1:
            count = "several of them are given" if kinds else "none of them is given"
            raise OptionFault(f"regex, json_schema and lark: {count}: expected one of the three")
        if self.regex is not None:
            rules, kind, text, brackets = _rule_of(self.regex), "the regular expression", self.regex, "("
        elif self.lark is not None:
            rules, kind, text, brackets = self.lark, "the grammar", self.lark, "(["
        else:
            schema = _schema_of(self.json_schema)
            rules, kind, text, brackets = f"start: {_schema_rule(schema)}", "the JSON schema", json.dumps(schema), "{["
        depth = _depth(text, brackets)
        for name, named_schema in self.schemas.items():
            rules += f"\n{name}: {_schema_rule(named_schema)}"
            depth = max(depth, _depth(json.dumps(named_schema), "{["))
        object.__setattr__(self, "source", f"{_OPTIONS}\n{rules}")
        object.__setattr__(self, "label", self.name or f"{kind} {_shown(text)}")
        object.__setattr__(self, "depth", depth)


def _schema_rule(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": _SPACE}, **schema})


def _rule_of(regex: str) -> str:
    if not isinstance(regex, str) or not regex:
        raise OptionFault(f"regex is {regex!r}: expected a regular expression of at least one character")
    escapes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}  # a rule is one line, and an unescaped / ends its expression
    escaped = re.sub(r"\\.|/|\n", lambda match: escapes.get(match[0], match[0]), regex, flags=re.DOTALL)
    return f"start: TEXT\nTEXT: /{escaped}/"


def _schema_of(option: object) -> dict[str, Any]:
    try:
        plain = dict(option) if isinstance(option, Mapping) else option
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
    for bracket in re.findall(f"[{re.escape(opening + closing)}]", text):
        depth = depth + 1 if bracket in opening else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _shown(text: str) -> str:
    return repr(text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 1] + "…")


def is_simple(grammar: Grammar) -> bool:
    """Whether a grammar compiles soon: llguidance limits expressions, but not the intersections of JSON schemas."""
    waiting: list[Any] = list(grammar.schemas.values())
    if grammar.json_schema is not None:
        waiting.append(json.loads(grammar.source.partition("%json ")[2]))
    if grammar.lark is not None:
        rules = _QUOTED.sub("", grammar.lark)
        if not _COSTLY.isdisjoint(rules) or rules.count("{") > 1:  # counts could be nested
            return False
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict):
            if not _INTERSECTIONS.isdisjoint(schema) or len(_TEXT_RULES.intersection(schema)) > 1:
                return False
            waiting += schema.values()
        elif isinstance(schema, list):
            waiting += schema
    return True
