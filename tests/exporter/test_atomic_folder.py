"""Atomic folder: the target is the old bundle, or none, until the new bundle is complete."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from spaceport.exporter import atomic_folder
from spaceport.exporter.atomic_folder import (
    TargetError,
    check_target,
    locked,
    publish,
    refuse_while_written,
    require_space,
    writing,
)
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
def test_the_target_is_the_old_bundle_or_none_until_the_new_one_is_complete(target: Path, overwrite: bool) -> None:
    (target.parent / "empty").mkdir()
    for path in (target.parent / "empty", target.parent / "new", *([target] if overwrite else [])):
        before = names(path) if path.exists() else None
        with writing(path, overwrite) as partial:
            fill(partial, b"a new graph")
            assert partial.parent == target.parent
            assert (names(path) if path.exists() else None) == before
            assert path != target or graph(path) == b"the old graph"
        assert graph(path) == b"a new graph"
    assert names(target.parent) == {"bundle", "empty", "new"}


@pytest.mark.slow
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


@pytest.mark.parametrize("fault", [ValueError("no"), KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("late", [True, False])
def test_a_failed_export_leaves_nothing_or_the_old_bundle(target: Path, fault: BaseException, late: bool) -> None:
    def break_off(partial: Path) -> None:
        if late:
            fill(partial, b"a new graph")
        raise fault

    for path in (target.with_name("new"), target):
        with pytest.raises(type(fault)):
            write(path, True, break_off)
    assert graph(target) == b"the old graph"
    assert names(target.parent) == {"bundle"}


def test_an_interrupt_while_the_folder_is_moved_is_deferred(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_folder(partial: Path) -> None:
        fill(partial, b"a new graph")
        # called next after the folder was moved
        monkeypatch.setattr(atomic_folder, "flush", lambda folder: os.kill(os.getpid(), signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        write(target, True, fill_folder)
    assert graph(target) == b"a new graph"
    assert names(target.parent) == {"bundle"}


def test_a_folder_that_another_process_begins_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, target = tmp_path / "partial", tmp_path / "target"
    partial.mkdir()
    monkeypatch.setattr(atomic_folder, "flush", lambda folder: partial.mkdir())  # called after the folder was moved
    publish(partial, target)
    assert target.is_dir()
    assert partial.is_dir()


def refused(target: Path, overwrite: bool, message: str) -> None:
    """Verify that a target is refused, before the export and again when the folder is written."""
    before = names(target.parent)
    with pytest.raises(TargetError, match=message):
        check_target(target, overwrite)
    with pytest.raises(TargetError, match=message), writing(target, overwrite):
        pytest.fail("started to write")
    assert names(target.parent) == before


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_bundle_is_replaced_only_with_overwrite_and_another_target_never(target: Path, overwrite: bool) -> None:
    if not overwrite:
        refused(target, False, "a bundle exists there: replace it with --overwrite")
    other = target.with_name("other")
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    refused(other, overwrite, "contains files but no bundle: choose another name, these files would be lost")
    assert names(other) == {"thesis.txt"}
    refused(other / "thesis.txt", overwrite, "exists and is not a folder: choose another name")
    assert (other / "thesis.txt").read_text() == "years of work"
    for goal in (other, other / "thesis.txt", target, target.with_name("nowhere")):
        link = target.with_name(f"link to {goal.name}")
        link.symlink_to(goal)
        refused(link, overwrite, "exists and is not a folder: choose another name")
        assert link.readlink() == goal
    assert graph(target) == b"the old graph"


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_is_written_to_the_target_in_the_meantime_is_not_lost(tmp_path: Path, overwrite: bool) -> None:
    path, other = tmp_path / "bundle", tmp_path / "other"

    def a_thesis(partial: Path) -> None:
        path.mkdir()
        (path / "thesis.txt").write_text("years of work")
        fill(partial)

    def a_bundle(partial: Path) -> None:
        other.mkdir()
        fill(other, b"the first graph")
        fill(partial, b"a new graph")

    with pytest.raises(TargetError, match="contains files but no bundle"):
        write(path, overwrite, a_thesis)
    assert names(path) == {"thesis.txt"}
    with pytest.raises(TargetError, match="a bundle exists there"):
        write(other, False, a_bundle)
    assert graph(other) == b"the first graph"
    assert names(tmp_path) == {"bundle", "other"}


def started(target: Path) -> subprocess.Popen[str]:
    """Another process that is writing a bundle to the target."""
    process = python(WRITER, target)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_an_export_removes_the_remains_of_a_killed_one_and_does_not_disturb_a_running_one(target: Path) -> None:
    dead, alive = started(target), started(target)
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    with writing(target, overwrite=True) as partial:
        others = names(target.parent) - {"bundle", partial.name}
        assert [f"-{alive.pid}-" in name for name in others] == [True]
        fill(partial, b"a new graph")
    assert graph(target) == b"a new graph"
    alive.communicate()
    assert (alive.returncode, graph(target)) == (0, b"another graph")
    assert names(target.parent) == {"bundle"}


def test_an_export_to_a_folder_that_another_process_is_writing_is_refused(target: Path) -> None:
    alive = started(target)
    with pytest.raises(TargetError, match=f"bundle: process {alive.pid} is writing a bundle there: wait until it has"):
        refuse_while_written(target)
    refuse_while_written(target.with_name("other"))
    alive.send_signal(signal.SIGSTOP)  # it cannot release its lock on its own
    with pytest.raises(TargetError, match="is writing a bundle there"):
        refuse_while_written(target)
    alive.send_signal(signal.SIGKILL)
    alive.communicate()
    refuse_while_written(target)  # what it left is no reason


def test_missing_permissions_are_reported() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's temporary folders are private
        public, bundle = Path(name), Path(name) / "bundle"
        bundle.mkdir()
        fill(bundle)
        closed = {public: 0o555, bundle: 0o555}
        try:
            for file in (bundle / MODEL_FILE, bundle / MANIFEST_FILE, None):
                for path, mode in {**closed, **({} if file is None else {file: 0o000})}.items():
                    path.chmod(mode)
                output, _ = python(STRANGER, bundle, public / "new").communicate()
                reading, there = output.splitlines()
                if file is None:
                    assert reading == "done"
                else:
                    assert reading == f"BundleError {file}: Permission denied: expected a readable file"
                    file.chmod(0o644)
                assert there == (
                    f"TargetError {public}: no permission to write in it: choose another folder for the bundle"
                )
        finally:
            for path in closed:
                path.chmod(0o755)
        assert names(public) == {"bundle"}


def test_a_target_that_cannot_be_created_is_refused_before_any_work(tmp_path: Path) -> None:
    """The permissions of a file system that root cannot write to do not show it."""
    (tmp_path / "file").write_text("")
    for target, message in (
        (Path("/proc/bundle"), "choose another folder"),
        (Path("/proc/self/bundle"), r"choose another folder|create it first"),
        (tmp_path / "nowhere" / "bundle", f"{tmp_path / 'nowhere'}: no such folder: create it first"),
        (tmp_path / "file" / "bundle", "no such folder"),
        (tmp_path / ("a" * 256), "File name too long: choose another folder for the bundle, or another name"),
    ):
        with pytest.raises(TargetError, match=message):
            check_target(target, overwrite=False)


def fill_the_disk(target: Path, error: Exception) -> None:
    with writing(target, False, needed=5000) as partial:
        (partial / "model").write_bytes(bytes(9))
        raise error


def test_a_full_disk_is_reported_before_the_export_or_with_the_bytes_that_were_written(tmp_path: Path) -> None:
    require_space(tmp_path, 0)
    with pytest.raises(TargetError, match=r"\d+ MB free, the bundle needs about 1000000000000 MB: free some space or"):
        require_space(tmp_path, 10**18)

    def fail(partial: Path) -> None:
        (partial / "model").write_bytes(bytes(1234))
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device after 1,234 bytes: free some space .*/bundle'"):
        write(tmp_path / "bundle", False, fail)

    hidden = (OSError("172032 requested and 100288 written"), ValueError("I/O error: No space (os error 28)"))
    for error in hidden:  # those of NumPy and of safetensors
        expected = r"\[Errno 28\] No space left on device after 9 bytes of about 5,000: free some space .*/bundle'"
        with pytest.raises(OSError, match=expected):
            fill_the_disk(tmp_path / "bundle", error)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_has_one_holder_at_a_time_and_closes_its_descriptor(tmp_path: Path) -> None:
    """Each thread increments a number by reading and writing it; concurrent increments would be lost."""
    file = tmp_path / "number"
    file.write_text("0")

    def add() -> None:
        for _ in range(50):
            with locked(tmp_path) as descriptor:
                assert os.path.samestat(os.fstat(descriptor), tmp_path.stat())
                file.write_text(str(int(file.read_text()) + 1))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int(file.read_text()) == 200
    assert names(tmp_path) == {"number"}
    with locked(tmp_path) as descriptor:
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
