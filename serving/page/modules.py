"""Modules: the JavaScript modules and the style that draw traces, as files of a service or inside one HTML file."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from pathlib import Path

STATIC = Path(__file__).with_name("static")

_IMPORT = re.compile(r"^(import [^;]*? from |export [^;]*? from )'\./([\w-]+\.js)';", re.MULTILINE)


def style(*names: str) -> str:
    """Style sheets, one after the other."""
    return "".join((STATIC / f"{name}.css").read_text("utf-8") for name in names)


def import_map(entry: str) -> str:
    """An import map with a module and all that it imports, each as a data URL under its file name."""
    found: dict[str, str] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name not in found:
            source = (STATIC / name).read_text("utf-8")
            waiting += [match[2] for match in _IMPORT.finditer(source)]
            named = _IMPORT.sub(r"\1'\2';", source)
            found[name] = f"data:text/javascript;base64,{b64encode(named.encode()).decode()}"
    return json.dumps({"imports": dict(sorted(found.items()))}, indent=1)
