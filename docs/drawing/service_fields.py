"""The page with the generation options, from their declarations, and all fields of requests, from the structs of bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any, get_origin

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.limits import DEFAULT_LIMITS
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.option_fields import option_fields
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.serving.bodies import IGNORED, OPTION_FIELDS, REFUSED, SUPPORTED, Own
from spaceport.serving.openapi import BODIES, schemas
from spaceport.serving.options import ServiceOptions

Schemas = dict[str, dict[str, Any]]
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "service_fields.md"
_NAMES = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text",
    "/v1/responses": "responses",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
_HEAD = """# Options and fields of requests

`python docs/drawing/service_fields.py` writes this page from what the code declares.
`GET /openapi.json` has the fields as OpenAPI 3.1, with the limits of the service that is asked.
Bounds are those of the default limits; a value beyond them gets a 400 that names the field.

## Generation options

In Python, [`Decoding`](decoding.md), `Sampling` and `Grammar` ([sampling.md](sampling.md)) have them by name.
`spaceport generate` has the flags; those of switches have an opposite, such as `--no-fork`.
Requests for completions have the fields.
"""
_MORE = """
## Fields

Endpoints are `/v1/chat/completions`, `/v1/completions` (text) and `/v1/responses`; "all" are these three.
"""
_KINDS = {int: "integer", float: "number", bool: "boolean", str: "string", Mapping: "object"}
_ALL = "chat, text, responses"


def page() -> str:
    """The page."""
    found = schemas(DEFAULT_LIMITS, ServiceOptions().most_choices)
    lines = [_HEAD, *options_table(found), _MORE, *fields_table(found), "", *objects_table(found), ""]
    ignored = {*IGNORED, *(name for name, text in SUPPORTED.items() if text.startswith("Ignored"))}
    names = wrap(", ".join(f"`{name}`" for name in sorted(ignored)) + ".", 118, break_on_hyphens=False)
    lines += ["## Ignored", "", "These fields are accepted without effect, also with `--strict`:", *names]
    lines += ["", "## Refused", "", "These fields get a 400 that names them, unless their value asks for nothing.", ""]
    lines += ["| fields | instead |", "|---|---|"]
    for advice in sorted({refused.advice for refused in REFUSED.values()}):
        names = [f"`{name}`" for name, refused in sorted(REFUSED.items()) if refused.advice == advice]
        lines.append(f"| {', '.join(names)} | {advice} |")
    lines += ["", "All other fields are ignored and named in the debug log; `--strict` refuses them.", ""]
    return "\n".join(lines)


def options_table(found: Schemas) -> list[str]:
    """The generation options: where each can be set, its type, default and meaning."""
    lines = ["| option | flag | field | type | default | |", "|---|---|---|---|---|---|"]
    fields = {**found[Own.__name__]["properties"]} | {
        name: schema for body in BODIES.values() for name, schema in found[body.__name__]["properties"].items()
    }
    for declared in (entry for options in (Decoding, Sampling, Grammar) for entry in option_fields(options)):
        if declared.flag is None and declared.request is None:
            continue
        schema = fields.get((declared.request or "").removeprefix("spaceport."))
        kind = _KINDS.get(get_origin(declared.kind) or declared.kind, "array")
        kinds = declared.values if declared.choices else kind if schema is None else type_of(schema)
        default = declared.default_text
        if declared.request_default != declared.default:
            default += f"; field: {shown(declared.request_default)}"
        field = re.sub(r"(\w+)\.(\w+)", r"\2` in `\1", declared.request or "")
        names = [f"`{name}`" if name else "" for name in (declared.name, declared.flag, field)]
        text = SUPPORTED.get(declared.request or "", declared.text)
        lines.append(f"| {' | '.join(names)} | {kinds} | {default} | {text} |".replace("|  |", "| |"))
    return lines


def fields_table(found: Schemas) -> list[str]:
    """The other fields of requests, by name."""
    rows: dict[str, tuple[list[str], list[str]]] = {}
    for path, body in BODIES.items():
        for name, schema in sorted(found[body.__name__]["properties"].items()):
            if name in OPTION_FIELDS or schema["description"].startswith("Ignored"):
                continue
            ends, kinds = rows.setdefault(name, ([], []))
            ends.append(_NAMES[path])
            kinds += [kind for kind in [type_of(schema)] if kind not in kinds]
    return ["| field | endpoints | type | |", "|---|---|---|---|"] + [
        f"| `{name}` | {', '.join(ends).replace(_ALL, 'all')} | {' / '.join(kinds)} | {SUPPORTED[name]} |"
        for name, (ends, kinds) in sorted(rows.items())
    ]


def objects_table(found: Schemas) -> list[str]:
    """The fields of objects, other than the generation options."""
    inner: dict[str, str] = {}
    for body in BODIES.values():
        for name, schema in sorted(found[body.__name__]["properties"].items()):
            for other in references_of(schema):
                inner.setdefault(other, name)
    lines = ["| object | fields |", "|---|---|"]
    for name in sorted({*inner.values()}):
        fields = {key: of for other in inner if inner[other] == name for key, of in found[other]["properties"].items()}
        listed = [
            f"`{key}` {type_of(of)}" for key, of in sorted(fields.items()) if f"{name}.{key}" not in OPTION_FIELDS
        ]
        lines.append(f"| `{name}` | {', '.join(listed)} |")
    return lines


def type_of(schema: dict[str, Any]) -> str:
    """Type and bounds of a field."""
    return " or ".join(_branch(one) for one in schema.get("anyOf", [schema]) if one.get("type") != "null")


def references_of(schema: dict[str, Any]) -> list[str]:
    """The objects that a field may be."""
    return [one["$ref"].rpartition("/")[2] for one in schema.get("anyOf", [schema]) if "$ref" in one]


def shown(value: Any) -> str:
    """A value as JSON."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value).replace("'", '"')


def _branch(schema: dict[str, Any]) -> str:
    kind = "object" if "$ref" in schema else schema.get("type", " or ".join(map(shown, schema.get("enum", ["any"]))))
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None:
        kind += f" {least} to {most}" if most is not None else f" from {least}"
    for name, unit in (("maxLength", "characters"), ("maxItems", "items"), ("maxProperties", "entries")):
        if name in schema:
            kind += f", at most {schema[name]:,} {unit}"
    return kind


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(f"{PAGE.relative_to(ROOT)}: written")
