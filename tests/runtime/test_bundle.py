"""Bundle: what was changed after it was written does not open, and says why."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from spaceport.graphs.contract.manifest import DATA_FILE, MANIFEST_FILE, MODEL_FILE, TOKENIZER_FILE
from spaceport.runtime.bundle import open_bundle
from support.small_bundle import edit, fill, new_bundle, refused


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return new_bundle(tmp_path / "bundle")


def test_a_bundle_opens_as_it_was_written(tmp_path: Path) -> None:
    written = fill(tmp_path)
    opened = open_bundle(tmp_path)
    assert opened.manifest == written
    assert opened.path == tmp_path
    assert set(written.files) == {MODEL_FILE, DATA_FILE, TOKENIZER_FILE}
    assert open_bundle(str(tmp_path)).manifest == written
    (tmp_path.with_name("link")).symlink_to(tmp_path)  # a link to the whole bundle is no danger
    assert open_bundle(tmp_path.with_name("link")).manifest == written


@pytest.mark.parametrize("name", [MODEL_FILE, DATA_FILE, TOKENIZER_FILE])
def test_a_file_of_other_content_or_length_is_refused(bundle: Path, name: str) -> None:
    content = (bundle / name).read_bytes()
    (bundle / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(bundle, rf"{name}: sha256 is [0-9a-f]{{12}}…, the manifest says [0-9a-f]{{12}}…: copy .* or export")
    for size in (0, len(content) - 1, len(content) + 1):
        os.truncate(bundle / name, size)
        refused(bundle, f"{name}: {size} bytes, the manifest says {len(content)}: copy .* or export")
    (bundle / name).unlink()
    refused(bundle, f"{name}: No such file or directory: copy .* or export")
    if name != DATA_FILE:
        edit(bundle, lambda reported: reported["files"].pop(name))
        refused(bundle, f"the manifest lists no {name}: expected one; export")


def test_what_is_no_bundle_is_refused_with_its_reason(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "no such folder: expected a bundle, the folder that `spaceport export` wrote")
    (tmp_path / "file").write_text("text")
    refused(tmp_path / "file", "is a file: expected a bundle, the folder that `spaceport export` wrote")
    refused(tmp_path, r"no manifest\.json in it: expected a bundle that `spaceport export` wrote$")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, r"expected a bundle that `spaceport export` wrote \(this is a checkpoint: export it first\)")


@pytest.mark.parametrize(
    "name",
    [
        *("../outside", "..", ".", "", "/etc/passwd", "//etc/passwd", "a/../../outside", "a/../tokenizer.json"),
        *("a//tokenizer.json", "./tokenizer.json", "tokenizer.json/", "a\\b", "..\\outside", "C:\\outside"),
        *("tokenizer.json\0", "\0", "a\nb", "\x1b[2J", "\ud800", "\udcff"),
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(bundle: Path, name: str) -> None:
    (bundle.parent / "outside").write_bytes(b"")
    (bundle / "a").mkdir()
    edit(bundle, lambda reported: reported["files"].update({name: {"sha256": "0" * 64, "size": 0}}))
    refused(
        bundle, f"the manifest names .*: expected a path inside the folder|{re.escape(str(bundle))}: not a regular file"
    )


def test_a_file_in_a_folder_of_the_bundle_is_part_of_it(bundle: Path) -> None:
    file = add_engine(bundle)
    assert "engines/one.engine" in open_bundle(bundle).manifest.files
    file.write_bytes(b"A graph")
    refused(bundle, "one.engine: sha256 is")
    file.write_bytes(b"a graph")
    edit(bundle, lambda reported: reported["files"].update({"a" * 5000: {"sha256": "0" * 64, "size": 0}}))
    refused(bundle, "File name too long")


def add_engine(bundle: Path) -> Path:
    """A file in a folder of the bundle, listed in its manifest."""
    file = bundle / "engines" / "one.engine"
    file.parent.mkdir()
    shutil.copy(bundle / MODEL_FILE, file)
    edit(bundle, lambda reported: reported["files"].update({"engines/one.engine": reported["files"][MODEL_FILE]}))
    return file


@pytest.mark.parametrize("name", [MANIFEST_FILE, TOKENIZER_FILE, "engines/one.engine"])
def test_a_linked_file_is_refused(bundle: Path, name: str) -> None:
    add_engine(bundle)
    outside = bundle.parent / "outside"
    (bundle / name).rename(outside)
    (bundle / name).symlink_to(outside)
    refused(bundle, rf"{name}: not a regular file: copy the bundle with its links resolved \(cp -rL\), or allow links")
    (bundle / name).unlink()
    (bundle / name).hardlink_to(outside)
    refused(bundle, rf"{name}: has 2 hard links: .* another user .* copy the bundle \(cp -r\), or allow links")
    outside.unlink()
    open_bundle(bundle)  # the only link left


@pytest.mark.parametrize("name", ["weights.bin", "engines/weights.bin"])
def test_a_linked_file_that_no_manifest_lists_is_refused_as_well(bundle: Path, name: str) -> None:
    add_engine(bundle)
    outside = bundle.parent / "outside"
    outside.write_bytes(b"secret")
    (bundle / name).hardlink_to(outside)
    refused(bundle, f"{name}: has 2 hard links")
    (bundle / name).unlink()
    (bundle / name).symlink_to(outside)
    refused(bundle, f"{name}: not a regular file")
    (bundle / name).unlink()
    (bundle / name).write_bytes(b"one of its own")
    open_bundle(bundle)


@pytest.mark.parametrize("listed", [True, False])
def test_a_linked_folder_is_refused(bundle: Path, listed: bool) -> None:
    add_engine(bundle)
    if not listed:
        edit(bundle, lambda reported: reported["files"].pop("engines/one.engine"))
    outside = bundle.parent / "engines"
    (bundle / "engines").rename(outside)
    (bundle / "engines").symlink_to(outside)
    refused(bundle, r"engines: not a regular file: copy the bundle with its links resolved \(cp -rL\)")


@pytest.mark.parametrize("name", [MANIFEST_FILE, TOKENIZER_FILE, "unlisted"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(bundle: Path, name: str) -> None:
    (bundle / name).unlink(missing_ok=True)
    os.mkfifo(bundle / name)
    refused(bundle, f"{name}: not a regular file")
    if name != "unlisted":
        (bundle / name).unlink()
        (bundle / name).mkdir()
        refused(bundle, f"{name}: not a regular file")
