"""Provenance: where a checkpoint comes from, as far as its folder or file says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MOST = 200  # characters of an entry
_CARD_BYTES = 2**16  # of a model card, whose first lines hold the licence


def provenance_of(folder: Path, metadata: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Name, source, revision and licence of a checkpoint, without those that are not known.

    A folder in the cache of a model hub says its source and revision; a model card says the licence, and a GGUF file
    (`metadata`) can say all of them.
    """
    path = folder.absolute()
    found: dict[str, Any] = {"name": path.stem if metadata is not None else path.name}
    cached = re.search(r"/models--([^/]+)/snapshots/([0-9a-f]{40})(?:/|$)", str(path))
    if cached is not None:
        source = cached[1].replace("--", "/", 1)
        found |= {"name": source.rpartition("/")[2], "source": source, "revision": cached[2]}
    if metadata is not None:
        keys = {"name": "general.name", "source": "general.source.url", "licence": "general.license"}
        found |= {entry: metadata.get(key) or found.get(entry) for entry, key in keys.items()}
    elif (licence := _licence(path / "README.md")) is not None:
        found["licence"] = licence
    return {entry: value[:_MOST] for entry, value in found.items() if isinstance(value, str) and value.isprintable()}


def _licence(card: Path) -> str | None:
    """The licence in the first block of a model card."""
    try:
        if not card.is_file():
            return None
        with card.open("rb") as stream:
            text = stream.read(_CARD_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    block = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    line = re.search(r"^license:[ \t]*[\"']?([^\s\"']+)", block[1], re.MULTILINE) if block else None
    return line[1] if line else None
