"""Bundle files: what completes a bundle folder: every file recorded in its manifest, and all of it on the disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spaceport.graphs.contract.atomic_file import flush
from spaceport.graphs.contract.manifest import MANIFEST_FILE, Manifest, record_of


def seal(folder: Path, manifest: Manifest) -> Manifest:
    """Record every file of a folder in its manifest and write that last, so that no unfinished folder opens."""
    files = {}
    for file in sorted(folder.iterdir()):
        with file.open("rb") as stream:
            files[file.name] = record_of(stream)
        flush(file)
    sealed = replace(manifest, files=files)
    path = folder / MANIFEST_FILE
    path.write_text(sealed.as_json(), "utf-8")
    flush(path)
    flush(folder)
    return sealed
