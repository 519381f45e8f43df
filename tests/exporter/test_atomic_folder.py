"""Atomic folder: the target is the old bundle, or none, until the new bundle is complete."""

from __future__ import annotations

import errno
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spaceport.exporter import atomic_folder
from spaceport.exporter.atomic_folder import TargetError, check_target, publish, require_space, writing
from spaceport.graphs.contract.manifest import MANIFEST_FILE, MODEL_FILE
from spaceport.runtime.bundle import BundleError, open_bundle, read_manifest
from support.paths import TESTS
from support.small_bundle import fill

# argv: a target. Starts to write a bundle there, prints a line, and waits for the end of its input.
WRITER = """
import sys
from pathlib import Path
from support.small_bundle import fill
from spaceport.exporter.atomic_folder import writing
with writing(Path(sys.argv[1]), overwrite=True) as partial:
    fill(partial, b"another graph")
    print("writing", flush=True)
    sys.stdin.read()
"""

# argv: a target, the maximum file size in bytes. Tries to write a bundle there.
FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from support.small_bundle import fill
from spaceport.exporter.atomic_folder import writing
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    with writing(Path(sys.argv[1]), overwrite=True) as partial:
        fill(partial, b"another graph")
except OSError as error:
    sys.exit(error.strerror)
"""

# argv: a bundle and a target. Opens one and writes the other as a user without permissions.
STRANGER = """
import os, sys
from pathlib import Path
from spaceport.exporter.atomic_folder import check_target
from spaceport.runtime.bundle import open_bundle
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for action in (lambda: open_bundle(sys.argv[1]), lambda: check_target(Path(sys.argv[2]), False)):
    try:
        action()
        print("done")
    except Exception as error:
        print(type(error).__name__, error)
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Another process that can import the helpers of these tests."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, cwd=TESTS, **pipes)


def graph(bundle: Path) -> bytes:
    """The content of the graph file of a bundle, which must open."""
    return (open_bundle(bundle).path / MODEL_FILE).read_bytes()


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def write(path: Path, overwrite: bool, fill_folder: Callable[[Path], object]) -> None:
    """Write a bundle with the content that a function fills in."""
    with writing(path, overwrite) as partial:
        fill_folder(partial)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target with an existing bundle."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    fill(folder, b"the old graph")
    return folder


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("empty", [True, False], ids=["empty folder", "nothing there"])
def test_a_bundle_appears_only_when_it_is_complete(tmp_path: Path, overwrite: bool, empty: bool) -> None:
    path = tmp_path / "bundle"
    if empty:
        path.mkdir()
    with writing(path, overwrite) as partial:
        fill(partial, b"a new graph")
        assert partial.parent == tmp_path
        assert not path.exists() or not names(path)
    assert graph(path) == b"a new graph"
    assert names(tmp_path) == {"bundle"}


def test_an_old_bundle_stays_until_the_new_one_is_complete(target: Path) -> None:
    with writing(target, overwrite=True) as partial:
        fill(partial, b"a new graph")
        assert graph(target) == b"the old graph"
    assert graph(target) == b"a new graph"
    assert names(target.parent) == {"bundle"}


def test_a_bundle_exists_at_every_moment(target: Path) -> None:
    done = threading.Event()
    errors: list[BaseException] = []

    def watch() -> None:
        try:
            while not done.is_set():
                read_manifest(target)
        except BundleError as error:
            errors.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(60):
        with writing(target, overwrite=True) as partial:
            fill(partial)
    done.set()
    watcher.join()
    assert errors == []


def break_off(partial: Path, fault: BaseException, late: bool) -> None:
    if late:
        fill(partial, b"a new graph")
    raise fault


@pytest.mark.parametrize("fault", [ValueError("no"), KeyboardInterrupt(), SystemExit(1), OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("late", [True, False])
def test_a_failed_export_leaves_nothing_or_the_old_bundle(
    tmp_path: Path, target: Path, fault: BaseException, late: bool
) -> None:
    with pytest.raises(type(fault)):
        write(tmp_path / "new", False, lambda partial: break_off(partial, fault, late))
    with pytest.raises(type(fault)):
        write(target, True, lambda partial: break_off(partial, fault, late))
    assert graph(target) == b"the old graph"
    assert names(tmp_path) == {"bundle"}


def test_a_folder_that_another_process_begins_at_the_same_path_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, target = tmp_path / "partial", tmp_path / "target"
    partial.mkdir()
    monkeypatch.setattr(atomic_folder, "flush", lambda folder: partial.mkdir())  # called after the folder was moved
    publish(partial, target)
    assert target.is_dir()
    assert partial.is_dir()


def test_a_folder_without_manifest_does_not_open(target: Path) -> None:
    (target / MANIFEST_FILE).unlink()
    with pytest.raises(BundleError, match=r"no manifest\.json"):
        open_bundle(target)


def refused(target: Path, overwrite: bool, message: str) -> None:
    """Verify that a target is refused, before the export and again when the folder is written."""
    before = names(target.parent)
    with pytest.raises(TargetError, match=message):
        check_target(target, overwrite)
    with pytest.raises(TargetError, match=message), writing(target, overwrite):
        pytest.fail("started to write")
    assert names(target.parent) == before


def test_an_old_bundle_is_replaced_only_with_overwrite(target: Path) -> None:
    refused(target, False, "a bundle exists there: replace it with --overwrite")
    assert graph(target) == b"the old graph"


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_target_that_is_not_a_bundle_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    refused(other, overwrite, "contains files but no bundle: choose another name, these files would be lost")
    assert names(other) == {"thesis.txt"}
    refused(other / "thesis.txt", overwrite, "exists and is not a folder: choose another name")
    assert (other / "thesis.txt").read_text() == "years of work"
    for goal in (other, other / "thesis.txt", tmp_path / "nowhere"):
        link = tmp_path / f"link to {goal.name}"
        link.symlink_to(goal)
        refused(link, overwrite, "exists and is not a folder: choose another name")
        assert link.readlink() == goal


def test_a_link_to_a_bundle_is_not_replaced_by_a_bundle(target: Path) -> None:
    link = target.with_name("link")
    link.symlink_to(target)
    refused(link, True, "exists and is not a folder")
    assert graph(target) == b"the old graph"


@pytest.mark.parametrize("overwrite", [True, False])
def test_files_written_to_the_target_in_the_meantime_are_not_lost(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "bundle"

    def meanwhile(partial: Path) -> None:
        fill(partial)
        path.mkdir()
        (path / "thesis.txt").write_text("years of work")

    with pytest.raises(TargetError, match="contains files but no bundle"):
        write(path, overwrite, meanwhile)
    assert names(tmp_path) == {"bundle"}
    assert names(path) == {"thesis.txt"}


def test_a_bundle_written_in_the_meantime_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "bundle"

    def meanwhile(partial: Path) -> None:
        fill(partial, b"a new graph")
        path.mkdir()
        fill(path, b"the first graph")

    with pytest.raises(TargetError, match="a bundle exists there"):
        write(path, False, meanwhile)
    assert graph(path) == b"the first graph"
    assert names(tmp_path) == {"bundle"}


def test_a_missing_parent_folder_is_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=f"{tmp_path / 'nowhere'}: no such folder: create it first"):
        check_target(tmp_path / "nowhere" / "bundle", overwrite=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError, match="no such folder"):
        check_target(tmp_path / "file" / "bundle", overwrite=False)


def test_the_remains_of_a_killed_export_are_removed_by_the_next(target: Path) -> None:
    dead = python(WRITER, target)
    assert dead.stdout is not None
    assert dead.stdout.readline() == "writing\n"
    (left,) = names(target.parent) - {"bundle"}
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    assert graph(target) == b"the old graph"
    elsewhere = target.with_name(left.replace("partial-", "partial-another.machine."))
    other = target.with_name(left.replace("bundle", "bundle2"))
    for folder in (elsewhere, other):
        shutil.copytree(target.with_name(left), folder)
    with writing(target, overwrite=True) as partial:
        assert names(target.parent) == {"bundle", partial.name, elsewhere.name, other.name}
        fill(partial, b"a new graph")
    assert graph(target) == b"a new graph"
    with writing(other.with_name("bundle2"), overwrite=False) as partial:
        assert names(target.parent) == {"bundle", partial.name, elsewhere.name}
        fill(partial)


def test_a_running_export_is_not_disturbed(target: Path) -> None:
    alive = python(WRITER, target)
    assert alive.stdout is not None
    assert alive.stdout.readline() == "writing\n"
    with writing(target, overwrite=True) as partial:
        fill(partial, b"a new graph")
    assert graph(target) == b"a new graph"
    alive.communicate()
    assert alive.returncode == 0
    assert graph(target) == b"another graph"
    assert names(target.parent) == {"bundle"}


def test_missing_disk_space_is_reported_before_the_export(tmp_path: Path) -> None:
    require_space(tmp_path, 0)
    with pytest.raises(TargetError, match=r"\d+ MB free, the bundle needs about 1000000000000 MB: free some space or"):
        require_space(tmp_path, 10**18)


@pytest.mark.parametrize("most", [0, 5, 1000])
def test_a_full_disk_leaves_the_old_bundle(target: Path, most: int) -> None:
    """A limit on file sizes simulates the disk: 0 fails in the first file, 5 in the middle of it, 1000 in a later one."""
    process = python(FULL_DISK, target, most)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (1, "File too large\n")
    assert graph(target) == b"the old graph"
    assert names(target.parent) == {"bundle"}


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that all users may read; pytest's temporary folders are private."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_missing_permissions_are_reported(public: Path) -> None:
    bundle = public / "bundle"
    bundle.mkdir()
    fill(bundle)
    closed = {public: 0o555, bundle: 0o555}
    try:
        for file, message in ((bundle / MODEL_FILE, "model.onnx"), (bundle / MANIFEST_FILE, "manifest.json")):
            for path, mode in {**closed, file: 0o000}.items():
                path.chmod(mode)
            output, _ = python(STRANGER, bundle, public / "new").communicate()
            reading, writing_there = output.splitlines()
            assert reading == f"BundleError {bundle / message}: Permission denied: expected a readable file"
            assert writing_there == (
                f"TargetError {public}: no permission to write in it: choose another folder for the bundle"
            )
            file.chmod(0o644)
        output, _ = python(STRANGER, bundle, public / "new").communicate()
        assert output.splitlines()[0] == "done"
    finally:
        for path in closed:
            path.chmod(0o755)
    assert names(public) == {"bundle"}


@pytest.mark.parametrize("target", [Path("/proc/bundle"), Path("/proc/self/bundle")])
def test_a_folder_that_cannot_be_created_is_refused_before_any_work(target: Path) -> None:
    """The permissions of a file system that root cannot write to do not show it."""
    with pytest.raises(TargetError, match=r"choose another folder|create it first"):
        check_target(target, overwrite=False)


def test_a_name_that_is_too_long_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="File name too long: choose another folder for the bundle, or another name"):
        check_target(tmp_path / ("a" * 256), overwrite=False)


def test_a_full_disk_is_reported_with_the_path_and_the_bytes(tmp_path: Path) -> None:
    def write() -> None:
        with writing(tmp_path / "bundle", overwrite=False) as partial:
            (partial / "model").write_bytes(bytes(1234))
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device after 1,234 bytes: free some space .*/bundle'"):
        write()
