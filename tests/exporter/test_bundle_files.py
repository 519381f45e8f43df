"""Bundle files: the written manifest records every file of a bundle."""

from __future__ import annotations

import hashlib
from pathlib import Path

from spaceport.exporter.bundle_files import write_manifest
from spaceport.graphs.contract.manifest import DATA_FILE, MANIFEST_FILE, MODEL_FILE, FileRecord
from spaceport.graphs.contract.manifest_file import manifest_in
from support.small_bundle import fill


def test_every_file_is_recorded_with_size_and_hash(tmp_path: Path) -> None:
    fill(tmp_path)
    manifest = manifest_in((tmp_path / MANIFEST_FILE).read_bytes())
    contents = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.name != MANIFEST_FILE}
    assert len(contents) == 3
    assert manifest.files == {
        name: FileRecord(hashlib.sha256(content).hexdigest(), len(content)) for name, content in contents.items()
    }


def test_the_returned_manifest_equals_the_written_one(tmp_path: Path) -> None:
    manifest = fill(tmp_path)
    (tmp_path / MANIFEST_FILE).unlink()
    written = write_manifest(tmp_path, manifest)
    assert manifest_in((tmp_path / MANIFEST_FILE).read_bytes()) == written == manifest


def test_the_graph_digests_are_those_of_the_graph_and_its_weights(tmp_path: Path) -> None:
    manifest = fill(tmp_path, b"a graph")
    weights = (tmp_path / DATA_FILE).read_bytes()
    assert manifest.graph == (hashlib.sha256(b"a graph").hexdigest(), hashlib.sha256(weights).hexdigest())
    assert manifest.graph_bytes == len(b"a graph") + len(weights)
    assert set(manifest.files) > {MODEL_FILE, DATA_FILE}
