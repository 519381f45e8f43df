"""The page with the generation options, from their declarations, and all fields of requests, from the structs of bodies."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import wrap

from msgspec import structs

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.option_fields import OptionField, option_fields
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.serving.bodies import IGNORED, OPTION_FIELDS, SUPPORTED
from spaceport.serving.openapi import BODIES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "service_fields.md"
_NAMES = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text",
    "/v1/responses": "responses",
    "/infill": "infill",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
_HEAD = """# Options and fields of requests

`python docs/drawing/service_fields.py` writes this page from what the code declares.
`GET /openapi.json` has all fields with their types, and the bounds of the service that is asked.

## Generation options

In Python, [`Decoding`](decoding.md), `Sampling` and `Grammar` ([sampling.md](sampling.md)) have them by name;
`spaceport generate --help` lists the flags.
In requests they are fields of the same name: of the body (*yes*), or of its object `spaceport`.
"""
_MORE = """
## Other fields

Endpoints are `/v1/chat/completions`, `/v1/completions` (text) and `/v1/responses`; "all" are these three.
"""
_IGNORED = """
## Unknown fields

As with OpenAI's service, an unknown field gets a 400 that names it, unless its value is `null`.
These fields of OpenAI's API and of llama.cpp's server would change no text, and are ignored:
"""
_ALL = "chat, text, responses"


def page() -> str:
    """The page."""
    ignored = ", ".join(f"`{name}`" for name in sorted(IGNORED)) + "."
    names = wrap(ignored, 118, break_on_hyphens=False)
    return "\n".join([_HEAD, *options_table(), _MORE, *fields_table(), _IGNORED, *names, ""])


def options_table() -> list[str]:
    """The generation options: whether and where requests have them, their defaults and meanings."""
    declared = [entry for options in (Decoding, Sampling, Grammar) for entry in option_fields(options)]
    shown = [entry for entry in declared if entry.flag is not None or entry.request is not None]
    return ["| option | field | default | |", "|---|---|---|---|", *map(_row, shown)]


def fields_table() -> list[str]:
    """The other fields of requests, by name."""
    ends: dict[str, list[str]] = {}
    for path, body in BODIES.items():
        for entry in structs.fields(body):
            if entry.encode_name not in OPTION_FIELDS:
                ends.setdefault(entry.encode_name, []).append(_NAMES[path])
    rows = [f"| `{name}` | {', '.join(ends[name]).replace(_ALL, 'all')} | {SUPPORTED[name]} |" for name in sorted(ends)]
    own = f"| `threads` in `spaceport` | chat, text | {SUPPORTED['spaceport.threads']} |"
    return ["| field | endpoints | |", "|---|---|---|", *rows, own]


def _row(declared: OptionField) -> str:
    where, _, name = (declared.request or "").rpartition(".")
    field = f"`{where}`" if where else "yes" if name == declared.name else f"`{name}`" if name else ""
    default = declared.default_text
    if declared.request_default != declared.default:
        default += f"; field: {json.dumps(declared.request_default)}"
    text = SUPPORTED.get(declared.request or "", declared.text)
    return f"| `{declared.name}` | {field} | {default} | {text} |".replace("|  |", "| |")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(f"{PAGE.relative_to(ROOT)}: written")
