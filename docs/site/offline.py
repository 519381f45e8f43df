"""Offline: no built page makes a browser load anything over a network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

# Attributes whose address a browser loads by itself. A link that a reader clicks is none, nor is a page's own address.
LOADED = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "image": ("href", "xlink:href"),
    "img": ("src", "srcset"),
    "input": ("src",),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "track": ("src",),
    "use": ("href", "xlink:href"),
    "video": ("src", "poster"),
}
UNLOADED = {"canonical", "alternate", "author", "help", "license", "next", "prev", "search"}  # of <link rel="...">
FAR = re.compile(r"(?:https?:)?//", re.IGNORECASE)
IN_STYLES = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^'\")\s]+)", re.IGNORECASE)


class Loads(HTMLParser):
    """Collects what a page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._styled = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._styled = tag == "style"
        given = {name: value or "" for name, value in attrs}
        self.found += IN_STYLES.findall(given.get("style", ""))
        if tag == "link" and set(given.get("rel", "").lower().split()) <= UNLOADED:
            return
        for name in LOADED.get(tag, ()):
            self.found += [part.strip() for part in given.get(name, "").split(",") if FAR.match(part.strip())]

    def handle_data(self, data: str) -> None:
        if self._styled:
            self.found += IN_STYLES.findall(data)


def loads_of(page: str) -> list[str]:
    """The addresses that a browser would load over a network to show a page."""
    parser = Loads()
    parser.feed(page)
    return parser.found


def faults(folder: Path) -> Iterator[str]:
    """What the pages and styles of a folder load over a network."""
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".html", ".svg"):
            found = loads_of(file.read_text("utf-8"))
        elif file.suffix == ".css":
            found = IN_STYLES.findall(file.read_text("utf-8"))
        else:
            continue
        yield from (f"{file.relative_to(folder)} loads {address}" for address in found)


def on_post_build(config: Any) -> None:
    """Fail the build if a page needs a network."""
    if found := list(faults(Path(config.site_dir))):
        raise SystemExit("\n".join(["docs: got pages that load over a network, expected none:", *found[:20]]))
