"""Bundle: what was changed after it was written does not open; what was verified is read."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from spaceport.graphs.contract.manifest import (
    DATA_FILE,
    ENGINES_FOLDER,
    MANIFEST_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
)
from spaceport.runtime import memory
from spaceport.runtime.bundle import Bundle, BundleError, ChangedWhileOpening, open_bundle, read_manifest
from spaceport.runtime.opened_files import OpenedFiles
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


@pytest.mark.parametrize("name", [MANIFEST_FILE, TOKENIZER_FILE, "engines/one.engine", "unlisted", "engines/unlisted"])
def test_a_linked_file_is_refused(bundle: Path, name: str) -> None:
    add_engine(bundle)
    (bundle / name).touch()
    outside = bundle.parent / "outside"
    (bundle / name).rename(outside)
    (bundle / name).symlink_to(outside)
    refused(bundle, rf"{name}: not a regular file: copy the bundle with its links resolved \(cp -rL\), or allow links")
    (bundle / name).unlink()
    (bundle / name).hardlink_to(outside)
    refused(bundle, rf"{name}: has 2 hard links: .* another user .* copy the bundle \(cp -r\), or allow links")
    outside.unlink()
    open_bundle(bundle)  # the only link left
    (bundle / name).unlink()
    os.mkfifo(bundle / name)
    refused(bundle, f"{name}: not a regular file")  # and not waited for
    if "unlisted" not in name:
        (bundle / name).unlink()
        (bundle / name).mkdir()
        refused(bundle, f"{name}: not a regular file")


@pytest.mark.parametrize("listed", [True, False])
def test_a_linked_folder_is_refused(bundle: Path, listed: bool) -> None:
    add_engine(bundle)
    if not listed:
        edit(bundle, lambda reported: reported["files"].pop("engines/one.engine"))
    outside = bundle.parent / "engines"
    (bundle / "engines").rename(outside)
    (bundle / "engines").symlink_to(outside)
    refused(bundle, r"engines: not a regular file: copy the bundle with its links resolved \(cp -rL\)")


ADVICE = r"allow links \(--allow-links, allow_links=True\)"


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
    shutil.rmtree(bundle.with_name("old"))  # it can be read as long as it is open
    assert opened.read(TOKENIZER_FILE)
    opened.require_unchanged()
    with pytest.raises(ChangedWhileOpening, match="No such file or directory: open the bundle again"):
        files_of(opened).require_same(DATA_FILE)


def test_a_bundle_that_is_replaced_while_its_manifest_is_read_is_opened_again(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old, read = shutil.copytree(bundle, tmp_path / "new"), tmp_path / "old", OpenedFiles.first_bytes

    def replace_first(files: OpenedFiles, name: str, most: int) -> bytes:
        if new.exists():
            bundle.rename(old)
            (old / MANIFEST_FILE).unlink()
            new.rename(bundle)
        return read(files, name, most)

    monkeypatch.setattr(OpenedFiles, "first_bytes", replace_first)
    assert open_bundle(bundle).manifest == read_manifest(bundle)
    assert old.exists()


def test_a_file_that_was_replaced_changed_or_swapped_there_and_back_is_not_read(bundle: Path) -> None:
    opened = open_bundle(bundle)
    (bundle / TOKENIZER_FILE).unlink()
    (bundle / TOKENIZER_FILE).write_bytes(b"another")
    assert b"another" not in opened.read(TOKENIZER_FILE)
    (bundle / DATA_FILE).rename(bundle / "old")
    (bundle / "old").rename(bundle / DATA_FILE)
    with pytest.raises(ChangedWhileOpening, match=f"{DATA_FILE}: was changed or replaced while it was opened"):
        files_of(opened).require_same(DATA_FILE)
    for content, message in ((bytes(7), "sha256 is"), (bytes(8), "8 bytes, the manifest says 7")):
        (bundle / MODEL_FILE).write_bytes(content)
        with pytest.raises(BundleError, match=f"{MODEL_FILE}: {message}"):
            opened.read(MODEL_FILE)


@pytest.mark.parametrize("change", ["written", "truncated", "extended", "with its old times"])
def test_weights_that_change_while_they_are_used_are_noticed(bundle: Path, change: str) -> None:
    opened = open_bundle(bundle)
    opened.require_unchanged()
    size = {"truncated": 100, "extended": 5000}.get(change, 4096)
    (bundle / DATA_FILE).write_bytes(bytes(size))
    if change == "with its old times":
        os.utime(bundle / DATA_FILE, (0, 0))
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


MADVISE, NEVER = "always [madvise] never", "always madvise [never]"


@pytest.mark.parametrize(
    ("format_name", "size", "setting", "limit", "copies"),
    [
        ("int8", 32_000_000, MADVISE, "max", True),
        ("int8", 32_000_000, MADVISE, "64000000", True),
        ("int8", 32_000_000, MADVISE, "63999999", False),
        ("int8", 32_000_000, NEVER, "max", False),
        ("int8", 31_999_999, MADVISE, "max", False),
        ("float32", 32_000_000, MADVISE, "max", False),
        ("int8", 32_000_000, None, "max", False),
        ("int8", 2**50, MADVISE, "max", False),
    ],
)
def test_weights_are_copied_where_huge_pages_make_steps_faster(
    format_name: str,
    size: int,
    setting: str | None,
    limit: str,
    copies: bool,
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, content in (("_SETTING", setting), ("_LIMIT", limit)):
        file = bundle.with_name(name)
        if content is not None:
            file.write_text(content)
        monkeypatch.setattr(memory, name, file)
    monkeypatch.setattr(OpenedFiles, "verify", lambda *arguments: None)
    edit(bundle, lambda entries: (entries["files"][DATA_FILE].update(size=size), entries.update(format=format_name)))
    assert open_bundle(bundle).copies_weights is copies
    assert open_bundle(bundle, copy_weights=not copies).copies_weights is not copies


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


def test_the_bytes_that_were_read_are_those_that_are_parsed(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is replaced as soon as it was read: parsing may not read it again."""
    written, read = (bundle / MANIFEST_FILE).read_bytes(), OpenedFiles.first_bytes

    def then_replaced(files: OpenedFiles, name: str, most: int) -> bytes:
        content = read(files, name, most)
        if name == MANIFEST_FILE:
            (bundle / MANIFEST_FILE).write_bytes(b"{}")
        return content

    monkeypatch.setattr(OpenedFiles, "first_bytes", then_replaced)
    opened = open_bundle(bundle)
    assert opened.manifest_content == written
    assert opened.manifest.parameters == json.loads(written)["parameters"]
