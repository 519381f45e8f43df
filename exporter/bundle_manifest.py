"""The manifest that completes a bundle's folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spaceport.graphs.contract.atomic_file import flush
from spaceport.graphs.contract.manifest import MANIFEST_FILE, Manifest, manifest_content, record_of


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest with the digests of all files of a folder, and flush everything to the disk.

    The manifest is written last: a folder without it does not open."""
    files = {}
    for file in sorted(folder.iterdir()):
        with file.open("rb") as stream:
            files[file.name] = record_of(stream)
        flush(file)
    complete = replace(manifest, files=files)
    path = folder / MANIFEST_FILE
    path.write_bytes(manifest_content(complete))
    flush(path)
    flush(folder)
    return complete
