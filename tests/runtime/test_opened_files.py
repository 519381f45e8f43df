"""Opened files: a bundle is read from the files that were verified, or not at all."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from spaceport.graphs.contract.manifest import (
    DATA_FILE,
    ENGINES_FOLDER,
    MANIFEST_FILE,
    MODEL_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
)
from spaceport.runtime.bundle import Bundle, BundleError, ChangedWhileOpening, open_bundle, read_manifest
from spaceport.runtime.opened_files import OpenedFiles
from support.small_bundle import edit, fill, new_bundle, refused

ADVICE = r"allow links \(--allow-links, allow_links=True\)"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return new_bundle(tmp_path / "bundle")


def files_of(bundle: Bundle) -> OpenedFiles:
    assert bundle.files is not None
    return bundle.files


def test_a_bundle_moved_to_the_path_of_an_open_one_is_not_mixed_with_it(bundle: Path) -> None:
    """133 of 275 opens during a swap combined the manifest of one bundle with the weights of the other."""
    opened = open_bundle(bundle)
    bundle.rename(bundle.with_name("old"))
    bundle.mkdir()
    fill(bundle, b"another graph")
    assert opened.read(MODEL_FILE) == b"a graph"
    assert Path(files_of(opened).location, MODEL_FILE).read_bytes() == b"a graph"
    files_of(opened).require_same(DATA_FILE)
    opened.require_unchanged()


def test_a_removed_bundle_can_be_read_as_long_as_it_is_open(bundle: Path) -> None:
    opened = open_bundle(bundle)
    shutil.rmtree(bundle)
    assert opened.read(TOKENIZER_FILE)
    opened.require_unchanged()
    with pytest.raises(ChangedWhileOpening, match="No such file or directory: open the bundle again"):
        files_of(opened).require_same(DATA_FILE)


def test_a_file_that_was_replaced_or_swapped_there_and_back_is_not_read(bundle: Path) -> None:
    opened = open_bundle(bundle)
    (bundle / TOKENIZER_FILE).unlink()
    (bundle / TOKENIZER_FILE).write_bytes(b"another")
    assert b"another" not in opened.read(TOKENIZER_FILE)
    (bundle / DATA_FILE).rename(bundle / "old")
    (bundle / "old").rename(bundle / DATA_FILE)
    with pytest.raises(ChangedWhileOpening, match=f"{DATA_FILE}: was changed or replaced while it was opened"):
        files_of(opened).require_same(DATA_FILE)


CHANGES: dict[str, Callable[[Path], object]] = {
    "written": lambda file: file.write_bytes(bytes(4096)),
    "truncated": lambda file: os.truncate(file, 100),
    "extended": lambda file: os.truncate(file, 5000),
    "with its old times": lambda file: (file.write_bytes(bytes(4096)), os.utime(file, (0, 0))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_while_they_are_used_are_noticed(bundle: Path, change: str) -> None:
    opened = open_bundle(bundle)
    opened.require_unchanged()
    CHANGES[change](bundle / DATA_FILE)
    for _ in range(2):
        with pytest.raises(BundleError, match=rf"{DATA_FILE}: .* while the runtime used it: close .*copy_weights=True"):
            opened.require_unchanged()


def test_weights_may_get_another_name_time_or_mode_while_they_are_used(bundle: Path) -> None:
    """Another user can create a hard link; a backup can set times; an export removes the old folder."""
    opened = open_bundle(bundle)
    (bundle / "other").hardlink_to(bundle / DATA_FILE)
    opened.require_unchanged()
    (bundle / DATA_FILE).chmod(0o400)
    opened.require_unchanged()
    (bundle / DATA_FILE).unlink()
    opened.require_unchanged()
    copied = open_bundle(new_bundle(bundle.with_name("copied")), copy_weights=True)
    (copied.path / DATA_FILE).write_bytes(b"other")
    copied.require_unchanged()


@pytest.mark.parametrize("name", [TOKENIZER_FILE, MODEL_FILE])
def test_a_file_changed_in_place_is_not_read(bundle: Path, name: str) -> None:
    opened = open_bundle(bundle)
    size = (bundle / name).stat().st_size
    (bundle / name).write_bytes(bytes(size))
    with pytest.raises(BundleError, match=f"{name}: sha256 is"):
        opened.read(name)
    (bundle / name).write_bytes(bytes(size + 1))
    with pytest.raises(BundleError, match=f"{name}: {size + 1} bytes, the manifest says {size}"):
        opened.read(name)


def linked(bundle: Path) -> None:
    """Replace the files of a bundle by links into a store, as a cache of a model hub has them."""
    store = bundle.with_name("blobs")
    store.mkdir()
    for number, file in enumerate(sorted(bundle.iterdir())):
        file.rename(store / str(number))
        file.symlink_to(Path("..", "blobs", str(number)))


def test_a_bundle_of_links_opens_if_links_are_allowed(bundle: Path) -> None:
    (bundle / "other").hardlink_to(bundle / DATA_FILE)
    refused(bundle, f"has 2 hard links: .*{ADVICE}")
    opened = open_bundle(bundle, allow_links=True)
    assert not opened.copies_weights
    files_of(opened).require_same(DATA_FILE)
    linked(bundle)
    refused(bundle, f"not a regular file: copy the bundle .*{ADVICE}")
    opened = open_bundle(bundle, allow_links=True)
    assert opened.read(MODEL_FILE) == b"a graph"
    assert opened.copies_weights, "ONNX Runtime follows no links out of a folder"
    assert read_manifest(bundle, allow_links=True) == opened.manifest


def test_links_to_what_is_no_file_are_refused_even_if_links_are_allowed(bundle: Path) -> None:
    os.mkfifo(bundle.with_name("fifo"))
    for target in (Path("/dev/zero"), bundle.with_name("fifo"), bundle.with_name("nothing")):
        for name in (MANIFEST_FILE, DATA_FILE):
            (bundle / name).rename(bundle / "old")
            (bundle / name).symlink_to(target)
            with pytest.raises(BundleError, match=rf"{name}: (not a regular file|No such file)"):
                open_bundle(bundle, allow_links=True)
            (bundle / "old").replace(bundle / name)


def test_a_file_in_a_linked_folder_is_not_read(bundle: Path) -> None:
    record = open_bundle(bundle).manifest.files[MODEL_FILE]
    outside = bundle.with_name("outside")
    outside.mkdir()
    shutil.copy(bundle / MODEL_FILE, outside / "x")
    (bundle / ENGINES_FOLDER).symlink_to(outside)
    with pytest.raises(BundleError, match=r"Not a directory|Too many levels"):
        OpenedFiles(bundle).read_recorded(f"{ENGINES_FOLDER}/x", record)
    assert OpenedFiles(bundle, links=True).read_recorded(f"{ENGINES_FOLDER}/x", record) == b"a graph"


def test_released_bundles_leave_no_descriptor_open(bundle: Path) -> None:
    descriptors = Path("/proc/self/fd") if Path("/proc/self/fd").exists() else Path("/dev/fd")
    gc.collect()
    before = len(list(descriptors.iterdir()))
    for _ in range(5):
        opened = open_bundle(bundle)
        del opened
    edit(bundle, lambda entries: entries["files"][DATA_FILE].update(size=1))
    for _ in range(5):
        refused(bundle, "the manifest says 1")
    assert len(list(descriptors.iterdir())) == before


def test_the_chat_template_is_part_of_what_is_verified(bundle: Path) -> None:
    (bundle / TEMPLATE_FILE).write_text("{{ messages }}")
    open_bundle(bundle)  # a file that no manifest lists
    edit(bundle, lambda entries: entries["files"].update({TEMPLATE_FILE: {"sha256": "0" * 64, "size": 14}}))
    refused(bundle, f"{TEMPLATE_FILE}: sha256 is")
