"""Grammars: schemas and expressions that take long to compile, beside normal requests; each ends or is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from random import Random
from typing import Any

from attack.outcome import Budget, Outcome
from attack.requests import normal_clients, percentile, prompts_with_texts
from spaceport.runtime import Decoding, Grammar, Runtime, SpaceportError

_PATIENCE = 60.0  # seconds of a case on a busy machine; a limit of the runtime ends it long before

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


def grammars() -> dict[str, dict[str, Any]]:
    """All grammars by name."""
    found: dict[str, Any] = {name: {"json_schema": json.dumps(schema)} for name, schema in SCHEMAS.items()}
    return found | {name: {"regex": regex} for name, regex in REGEXES.items()}


def slow_grammars(bundle: Path, seed: int, budget: Budget) -> Outcome:
    """Generate with each grammar, then with random parts of them, beside normal requests."""
    outcome, longest = Outcome("grammars", seed), (0.0, "")
    given = list(grammars().items())

    def attack() -> None:
        nonlocal longest
        for number in budget.numbers():
            random = Random(f"{seed} {number}")
            name, options = given[number] if number < len(given) else _combined(random)
            began = time.monotonic()
            result, fine = _result(runtime, options)
            took = time.monotonic() - began
            longest = max(longest, (took, name))
            outcome.note(f"{number} {name}", result, fine and took < _PATIENCE)

    with Runtime.open(bundle, threads=1, max_seq_len=512, max_requests=5, step_costs="standard") as runtime:
        expected = prompts_with_texts(runtime)
        quiet = normal_clients(runtime, expected, outcome, lambda: time.sleep(min(5.0, budget.seconds / 4)))
        busy = normal_clients(runtime, expected, outcome, attack)
    outcome.figures["longest"] = f"{longest[0]:.1f} s ({longest[1]})"
    outcome.figures["token gap p99"] = f"{percentile(quiet, 99)} quiet, {percentile(busy, 99)} beside grammars"
    return outcome


def _result(runtime: Runtime, options: dict[str, Any]) -> tuple[str, bool]:
    try:
        runtime.generate("x", Decoding(max_tokens=8, grammar=Grammar(**options), fork=False, timeout=20))
    except SpaceportError as error:
        return f"refused {type(error).__name__}", True
    except BaseException as error:  # noqa: BLE001  (what the campaign looks for)
        return f"untyped {type(error).__name__}: {str(error)[:100]}", False
    return "ended", True


def _combined(random: Random) -> tuple[str, dict[str, Any]]:
    """Some of the schemas in one."""
    names = random.sample(sorted(SCHEMAS), random.randrange(2, 4))
    keyword = random.choice(("allOf", "anyOf", "oneOf", "prefixItems"))
    return f"{keyword} {', '.join(names)}", {"json_schema": {keyword: [SCHEMAS[name] for name in names]}}
