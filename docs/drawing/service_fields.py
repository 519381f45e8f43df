"""Service fields: the page with all fields of requests to the service, from the structs of their bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spaceport.runtime.limits import DEFAULT_LIMITS
from spaceport.tools.serve.bodies import IGNORED, REFUSED
from spaceport.tools.serve.openapi import BODIES, schemas
from spaceport.tools.serve.options import ServiceOptions

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "service_fields.md"
_NAMES = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text",
    "/v1/responses": "responses",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
_HEAD = """# Fields of requests

`python docs/drawing/service_fields.py` writes this page from the bodies of [`spaceport serve`](service.md).
`GET /openapi.json` has the same as OpenAPI 3.1, with the limits of the service that is asked.
Bounds are those of the default limits; a value beyond them gets a 400 that names the field.
"""


def page() -> str:
    """The page."""
    found = schemas(DEFAULT_LIMITS, ServiceOptions().most_choices)
    rows: dict[str, tuple[list[str], list[str], str]] = {}
    inner: dict[str, str] = {}
    for path, body in BODIES.items():
        for name, schema in sorted(found[body.__name__]["properties"].items()):
            ends, kinds, _ = rows.setdefault(name, ([], [], schema["description"]))
            ends.append(_NAMES[path])
            kinds += [kind for kind in [type_of(schema)] if kind not in kinds]
            for other in references_of(schema):
                inner.setdefault(other, name)
    lines = [_HEAD, "## Fields", "", "| field | endpoints | type | |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {', '.join(ends)} | {' / '.join(kinds)} | {text} |"
        for name, (ends, kinds, text) in sorted(rows.items())
    ]
    lines += ["", "## Fields of objects", "", "| object | fields |", "|---|---|"]
    for other, name in sorted(inner.items(), key=lambda each: (each[1], each[0])):
        fields = ", ".join(f"`{one}` {type_of(of)}" for one, of in sorted(found[other]["properties"].items()))
        lines.append(f"| `{name}`: {found[other].get('description', other)} | {fields} |")
    lines += ["", "## Ignored", "", "These fields are accepted without effect, also with `--strict`.", ""]
    lines += ["| field | |", "|---|---|", *(f"| `{name}` | {why} |" for name, why in sorted(IGNORED.items()))]
    lines += ["", "## Refused", "", "These fields get a 400 that names them, unless their value asks for nothing.", ""]
    lines += ["| field | instead | values that are accepted |", "|---|---|---|"]
    for name, one in sorted(REFUSED.items()):
        lines.append(f"| `{name}` | {one.advice} | {', '.join(f'`{shown(each)}`' for each in one.neutral)} |")
    lines += ["", "All other fields are ignored and named in the debug log; `--strict` refuses them.", ""]
    return "\n".join(lines)


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
