"""Service fields: the page with all fields of requests to the service, from the structs of their bodies."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Any

from spaceport.runtime.limits import DEFAULT_LIMITS
from spaceport.serving.bodies import IGNORED, REFUSED
from spaceport.serving.openapi import BODIES, schemas
from spaceport.serving.options import ServiceOptions

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
Endpoints are `/v1/chat/completions`, `/v1/completions` (text) and `/v1/responses`; "all" are these three.
"""
_ALL = "chat, text, responses"


def page() -> str:
    """The page."""
    found = schemas(DEFAULT_LIMITS, ServiceOptions().most_choices)
    rows: dict[str, tuple[list[str], list[str], str]] = {}
    inner: dict[str, str] = {}
    ignored = {*IGNORED}
    for path, body in BODIES.items():
        for name, schema in sorted(found[body.__name__]["properties"].items()):
            if schema["description"].startswith("Ignored"):
                ignored.add(name)
                continue
            ends, kinds, _ = rows.setdefault(name, ([], [], schema["description"]))
            ends.append(_NAMES[path])
            kinds += [kind for kind in [type_of(schema)] if kind not in kinds]
            for other in references_of(schema):
                inner.setdefault(other, name)
    lines = [_HEAD, "## Fields", "", "| field | endpoints | type | |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {', '.join(ends).replace(_ALL, 'all')} | {' / '.join(kinds)} | {text} |"
        for name, (ends, kinds, text) in sorted(rows.items())
    ]
    lines += ["", "## Fields of objects", "", "| object | fields |", "|---|---|"]
    for name in sorted({*inner.values()}):
        fields = {key: of for other in inner if inner[other] == name for key, of in found[other]["properties"].items()}
        lines.append(f"| `{name}` | {', '.join(f'`{field}` {type_of(of)}' for field, of in sorted(fields.items()))} |")
    names = wrap(", ".join(f"`{name}`" for name in sorted(ignored)) + ".", 118, break_on_hyphens=False)
    lines += ["", "## Ignored", "", "These fields are accepted without effect, also with `--strict`:", *names]
    lines += ["", "## Refused", "", "These fields get a 400 that names them, unless their value asks for nothing.", ""]
    lines += ["| fields | instead |", "|---|---|"]
    for advice in sorted({refused.advice for refused in REFUSED.values()}):
        names = [f"`{name}`" for name, refused in sorted(REFUSED.items()) if refused.advice == advice]
        lines.append(f"| {', '.join(names)} | {advice} |")
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
