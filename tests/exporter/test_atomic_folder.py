"""Writing: a bundle takes its place when it is whole; until then, and whatever happens, there is the old one or none."""

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

from spaceport.exporter.atomic_folder import TargetError, check_target, require_space, writing
from spaceport.graphs.contract.manifest import MANIFEST_FILE, MODEL_FILE
from spaceport.runtime.bundle import BundleError, open_bundle, read_manifest
from support.paths import TESTS
from support.small_bundle import fill

# argv: a target. Begins to write a bundle there, says so, and goes on when it is told to.
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

# argv: a target, the most bytes that a file may have. Tries to write a bundle there.
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

# argv: a bundle and a target. Tries both as somebody whom they do not belong to.
STRANGER = """
import os, sys
from pathlib import Path
from spaceport.exporter.atomic_folder import check_target
from spaceport.runtime.bundle import open_bundle
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for deed in (lambda: open_bundle(sys.argv[1]), lambda: check_target(Path(sys.argv[2]), False)):
    try:
        deed()
        print("done")
    except Exception as error:
        print(type(error).__name__, error)
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Another process that knows the helpers of these tests."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, cwd=TESTS, **pipes)


def graph(bundle: Path) -> bytes:
    """What stands for the graph in a bundle that opens."""
    return (open_bundle(bundle).path / MODEL_FILE).read_bytes()


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def write(place: Path, overwrite: bool, deed: Callable[[Path], object]) -> None:
    """Write a bundle in which this is done."""
    with writing(place, overwrite) as partial:
        deed(partial)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where a bundle stands already."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    fill(folder, b"the old graph")
    return folder


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("empty", [True, False], ids=["empty folder", "nothing there"])
def test_a_bundle_is_there_when_it_is_whole_and_not_before(tmp_path: Path, overwrite: bool, empty: bool) -> None:
    place = tmp_path / "bundle"
    if empty:
        place.mkdir()
    with writing(place, overwrite) as partial:
        fill(partial, b"a new graph")
        assert partial.parent == tmp_path
        assert not place.exists() or not names(place)
    assert graph(place) == b"a new graph"
    assert names(tmp_path) == {"bundle"}


def test_an_old_bundle_stays_until_the_new_one_is_whole(target: Path) -> None:
    with writing(target, overwrite=True) as partial:
        fill(partial, b"a new graph")
        assert graph(target) == b"the old graph"
    assert graph(target) == b"a new graph"
    assert names(target.parent) == {"bundle"}


def test_at_every_moment_a_bundle_is_there(target: Path) -> None:
    over = threading.Event()
    missed: list[BaseException] = []

    def watch() -> None:
        try:
            while not over.is_set():
                read_manifest(target)
        except BundleError as error:
            missed.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(60):
        with writing(target, overwrite=True) as partial:
            fill(partial)
    over.set()
    watcher.join()
    assert missed == []


def break_off(partial: Path, fault: BaseException, late: bool) -> None:
    if late:
        fill(partial, b"a new graph")
    raise fault


@pytest.mark.parametrize("fault", [ValueError("no"), KeyboardInterrupt(), SystemExit(1), OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("late", [True, False])
def test_what_is_broken_off_leaves_nothing_or_the_old_bundle(
    tmp_path: Path, target: Path, fault: BaseException, late: bool
) -> None:
    with pytest.raises(type(fault)):
        write(tmp_path / "new", False, lambda partial: break_off(partial, fault, late))
    with pytest.raises(type(fault)):
        write(target, True, lambda partial: break_off(partial, fault, late))
    assert graph(target) == b"the old graph"
    assert names(tmp_path) == {"bundle"}


def test_a_folder_that_was_not_sealed_does_not_open(target: Path) -> None:
    (target / MANIFEST_FILE).unlink()
    with pytest.raises(BundleError, match=r"no manifest\.json"):
        open_bundle(target)


def refused(target: Path, overwrite: bool, message: str) -> None:
    """Hold that nothing is written to a target, and that it is known before any work is done."""
    before = names(target.parent)
    with pytest.raises(TargetError, match=message):
        check_target(target, overwrite)
    with pytest.raises(TargetError, match=message), writing(target, overwrite):
        pytest.fail("began to write")
    assert names(target.parent) == before


def test_an_old_bundle_is_only_replaced_when_that_is_asked_for(target: Path) -> None:
    refused(target, False, "a bundle exists there: replace it with --overwrite")
    assert graph(target) == b"the old graph"


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_is_no_bundle_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
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


def test_a_link_to_a_bundle_is_not_replaced_by_one(target: Path) -> None:
    link = target.with_name("link")
    link.symlink_to(target)
    refused(link, True, "exists and is not a folder")
    assert graph(target) == b"the old graph"


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_came_there_in_the_meantime_is_not_lost(tmp_path: Path, overwrite: bool) -> None:
    place = tmp_path / "bundle"

    def meanwhile(partial: Path) -> None:
        fill(partial)
        place.mkdir()
        (place / "thesis.txt").write_text("years of work")

    with pytest.raises(TargetError, match="contains files but no bundle"):
        write(place, overwrite, meanwhile)
    assert names(tmp_path) == {"bundle"}
    assert names(place) == {"thesis.txt"}


def test_a_bundle_that_came_there_in_the_meantime_is_only_replaced_when_that_is_asked_for(tmp_path: Path) -> None:
    place = tmp_path / "bundle"

    def meanwhile(partial: Path) -> None:
        fill(partial, b"a new graph")
        place.mkdir()
        fill(place, b"the first graph")

    with pytest.raises(TargetError, match="a bundle exists there"):
        write(place, False, meanwhile)
    assert graph(place) == b"the first graph"
    assert names(tmp_path) == {"bundle"}


def test_a_missing_parent_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=f"{tmp_path / 'nowhere'}: no such folder: create it first"):
        check_target(tmp_path / "nowhere" / "bundle", overwrite=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError, match="no such folder"):
        check_target(tmp_path / "file" / "bundle", overwrite=False)


def test_what_a_killed_export_left_is_swept_by_the_next(target: Path) -> None:
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


def test_an_export_that_is_under_way_is_left_alone(target: Path) -> None:
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


def test_a_disk_without_room_is_known_before_the_work(tmp_path: Path) -> None:
    require_space(tmp_path, 0)
    with pytest.raises(TargetError, match=r"\d+ MB free, the bundle needs about 1000000000000 MB: free some space or"):
        require_space(tmp_path, 10**18)


@pytest.mark.parametrize("most", [0, 5, 1000])
def test_a_disk_that_fills_up_leaves_the_old_bundle(target: Path, most: int) -> None:
    """A limit on the size of files stands for the disk: 0 the first file, 5 the middle of it, 1000 a later one."""
    process = python(FULL_DISK, target, most)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (1, "File too large\n")
    assert graph(target) == b"the old graph"
    assert names(target.parent) == {"bundle"}


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everybody may look into: the temporary folders of tests are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_what_may_not_be_read_or_written_is_an_error_that_says_so(public: Path) -> None:
    bundle = public / "bundle"
    bundle.mkdir()
    fill(bundle)
    closed = {public: 0o555, bundle: 0o555}
    try:
        for file, message in ((bundle / MODEL_FILE, "model.onnx"), (bundle / MANIFEST_FILE, "manifest.json")):
            for place, mode in {**closed, file: 0o000}.items():
                place.chmod(mode)
            output, _ = python(STRANGER, bundle, public / "new").communicate()
            reading, writing_there = output.splitlines()
            assert reading == f"BundleError {bundle / message}: Permission denied: expected a file that can be read"
            assert writing_there == (
                f"TargetError {public}: no permission to write in it: choose another folder for the bundle"
            )
            file.chmod(0o644)
        output, _ = python(STRANGER, bundle, public / "new").communicate()
        assert output.splitlines()[0] == "done"
    finally:
        for place in closed:
            place.chmod(0o755)
    assert names(public) == {"bundle"}
