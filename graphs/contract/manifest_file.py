"""Manifest file: the bytes of a bundle's manifest, written with their own digest and read strictly."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from spaceport.graphs.contract.manifest import SCHEMA, Manifest, ManifestError, manifest_of

_DIGEST = "sha256"  # last entry: the digest of the file, computed with zeros instead of it
_ZEROS = b"0" * 64


def manifest_content(manifest: Manifest) -> bytes:
    """The content of a manifest's file with its digest."""
    return with_digest(manifest.as_dict())


def with_digest(entries: dict[str, Any]) -> bytes:
    """The content of a file with these entries and its digest."""
    unsigned = {**entries, _DIGEST: _ZEROS.decode()}
    content = (json.dumps(unsigned, indent=2) + "\n").encode()
    return _with_digest(content, _ZEROS, hashlib.sha256(content).hexdigest().encode())


def manifest_in(content: bytes) -> Manifest:
    """The manifest in a file's content; raises ValueError if any part is invalid, or not as it was written."""
    entries = json.loads(content.decode(), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    if isinstance(entries, dict) and entries.get("schema") == SCHEMA:
        _verify(content, entries.pop(_DIGEST, None))
    return manifest_of(entries)


def _verify(content: bytes, digest: object) -> None:
    """Raise unless this is the digest of the content."""
    if not isinstance(digest, str) or not digest.isascii() or len(digest) != len(_ZEROS):
        raise ManifestError(f"{_DIGEST} is {digest!r:.80}: expected the digest of the manifest, 64 hexadecimal digits")
    found = hashlib.sha256(_with_digest(content, digest.encode(), _ZEROS)).hexdigest()
    if found != digest:
        raise ManifestError(f"{_DIGEST} is {digest[:12]}…, the digest of its content is {found[:12]}…: it was changed")


def _with_digest(content: bytes, old: bytes, new: bytes) -> bytes:
    """The content with another digest in its last entry."""
    before, _, after = content.rpartition(old)
    return before + new + after


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ManifestError(f"has the entry {ascii(name)[:80]} twice: expected each entry once")
        entries[name] = value
    return entries


def _refuse_constant(name: str) -> None:
    raise ManifestError(f"contains {name}: expected JSON numbers")
