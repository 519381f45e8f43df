"""Grammars: schemas and expressions that take long to compile; each ends or is refused."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]


def _nested(depth: int) -> Schema:
    schema: Schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _expressions(count: int) -> list[Schema]:
    return [{"pattern": f"^.{{0,{number + 2}}}(a|b){{1,{3 * number + 5}}}$"} for number in range(count)]


SCHEMAS: dict[str, Schema] = {
    "all of thirty expressions": {"type": "string", "allOf": _expressions(30)},
    "one of thirty expressions": {"type": "string", "oneOf": _expressions(30)},
    "none of thirty expressions": {"type": "string", "not": {"anyOf": _expressions(30)}},
    "60 levels": _nested(60),
    "300 levels": _nested(300),
    "enumeration of 4,000 texts": {"enum": [f"name {number}" for number in range(4000)]},
    "enumeration of a million characters": {"enum": ["x" * 100 + str(number) for number in range(10_000)]},
    "text of 10**9 characters": {"type": "string", "minLength": 10**9},
    "list of 10**6 items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    "schema that contains itself": {"$ref": "#"},
    "list of itself": {"type": "array", "items": {"$ref": "#"}, "minItems": 5},
    "500 patterns of properties": {"patternProperties": {f"^(a|b){{{n}}}": {"type": "null"} for n in range(500)}},
    "1,000 alternatives": {"anyOf": [{"type": "object", "properties": {f"p{n}": {}}} for n in range(1000)]},
    "large multiple": {"type": "integer", "multipleOf": 10**30 + 57, "minimum": 10**300},
    "format and length": {"type": "string", "format": "email", "minLength": 300, "maxLength": 301},
}
REGEXES = {
    "nested repetition": "((a{1,100}){1,100}){1,100}",
    "long repetition": "a{1,100000}",
    "many alternatives": "|".join(f"word{number}" for number in range(5000)),
    "60 groups": "(" * 60 + "a" + ")*" * 60,
    "1,000 groups": "(" * 1000 + "a" + ")" * 1000,
    "all of Unicode": "(\\w|\\W|\\p{L}){0,200}\\d{50}",
    "position from the end": "(a|b)*a(a|b){18}",
}


def random_grammar(random: Random) -> dict[str, Any]:
    """One of them, or some of the schemas in one, as arguments of a `Grammar`."""
    kind = random.random()
    if kind < 0.3:
        return {"regex": random.choice([*REGEXES.values()])}
    if kind < 0.7:
        return {"json_schema": random.choice([*SCHEMAS.values()])}
    chosen = random.sample([*SCHEMAS.values()], random.randrange(2, 4))
    return {"json_schema": {random.choice(("allOf", "anyOf", "oneOf", "prefixItems")): chosen}}
