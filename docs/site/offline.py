"""Offline: no built page makes a browser load anything over a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_FAR = r"(?:https?:)?//[^'\")\s>]+"
# Addresses that a browser loads by itself. A link that a reader clicks is none, nor is a page's own address.
_CLICKED = r"(?!a\b|link\b[^>]*\brel=[\"']?(?:canonical|alternate|license|next|prev)[\"'\s>])"
_LOADS = re.compile(
    rf"<{_CLICKED}[^>]*\s(?:src|srcset|(?:xlink:)?href|data|poster)=[\"']?(?:[^\"'>]*,\s*)?({_FAR})"
    rf"|url\(\s*['\"]?({_FAR})|@import\s+['\"]({_FAR})",
    re.IGNORECASE,
)
_CODE = re.compile(r"<(code|script)\b(?![^>]*\ssrc=).*?</\1>", re.DOTALL)  # shown, or run: neither is an address


def loads_of(page: str) -> list[str]:
    """The addresses that a browser would load over a network to show a page."""
    return ["".join(found) for found in _LOADS.findall(_CODE.sub("", page))]


def on_post_build(config: Any) -> None:
    """Fail the build if a page needs a network."""
    files = [file for file in sorted(Path(config.site_dir).rglob("*")) if file.suffix in (".html", ".svg", ".css")]
    found = [f"{file} loads {address}" for file in files for address in loads_of(file.read_text("utf-8"))]
    if found:
        raise SystemExit("\n".join(["docs: got pages that load over a network, expected none:", *found[:20]]))
