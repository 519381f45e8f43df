"""Atomic file: a reader sees the old content or the new one, and whatever fails leaves the old one and nothing else."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from spaceport.graphs.contract.atomic_file import is_partial, partial_of, replace_bytes, replace_text, replacing, staged

OLD, NEW = b"the old content\n" * 100, b"the new content\n" * 100

# Each way to replace a file.
WAYS: dict[str, Callable[[Path, bytes, bool], None]] = {}


def way(function: Callable[[Path, bytes, bool], None]) -> Callable[[Path, bytes, bool], None]:
    WAYS[function.__name__] = function
    return function


@way
def as_bytes(target: Path, content: bytes, durable: bool) -> None:
    replace_bytes(target, content, durable)


@way
def as_text(target: Path, content: bytes, durable: bool) -> None:
    replace_text(target, content.decode(), durable)


@way
def by_a_stream(target: Path, content: bytes, durable: bool) -> None:
    with replacing(target, durable) as stream:
        for start in range(0, len(content), 7):
            stream.write(content[start : start + 7])


EACH_WAY = pytest.mark.parametrize("replace", WAYS.values(), ids=WAYS)

# argv: a target, the most bytes that a file may have. Replaces the target, and prints what fails.
FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from spaceport.graphs.contract.atomic_file import replace_bytes, replacing
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
target, content = Path(sys.argv[1]), b"x" * 100_000
for durable in (False, True):
    try:
        replace_bytes(target, content, durable)
    except OSError as error:
        print(error.strerror)
    try:
        with replacing(target, durable) as stream:
            stream.write(content)
    except OSError as error:
        print(error.strerror)
"""

# argv: a target. Begins to write, says so, and ends when it is told to.
WRITER = """
import sys
from pathlib import Path
from spaceport.graphs.contract.atomic_file import replacing
with replacing(Path(sys.argv[1])) as stream:
    stream.write(b"of another process")
    print("writing", flush=True)
    sys.stdin.read()
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def begun(target: Path) -> subprocess.Popen[str]:
    """Another process that is writing to a target."""
    process = python(WRITER, target)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file with content, alone in its folder."""
    file = tmp_path / "file.json"
    file.write_bytes(OLD)
    return file


@EACH_WAY
@pytest.mark.parametrize("durable", [False, True])
def test_a_file_gets_its_new_content_and_nothing_else_stays(
    target: Path, replace: Callable[[Path, bytes, bool], None], durable: bool
) -> None:
    replace(target, NEW, durable)
    replace(target.with_name("another"), NEW, durable)
    assert target.read_bytes() == target.with_name("another").read_bytes() == NEW
    assert names(target.parent) == {target.name, "another"}
    plain = target.with_name("plain")
    plain.write_bytes(NEW)
    assert target.stat().st_mode == plain.stat().st_mode


def test_text_is_written_as_it_is(target: Path) -> None:
    replace_text(target, "one\ntwo\r\nthree ✓\r")
    assert target.read_bytes() == "one\ntwo\r\nthree ✓\r".encode()


def test_at_every_moment_the_old_content_or_the_new_is_there(target: Path) -> None:
    over, wrong = threading.Event(), list[bytes]()

    def watch() -> None:
        while not over.is_set():
            if (content := target.read_bytes()) not in (OLD, NEW):
                wrong.append(content)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(300):
        by_a_stream(target, NEW if number % 2 else OLD, False)
    over.set()
    watcher.join()
    assert wrong == []


def break_off(target: Path, written: bytes, fault: BaseException) -> None:
    with replacing(target) as stream:
        stream.write(written)
        raise fault


@pytest.mark.parametrize("fault", [ValueError("no"), KeyboardInterrupt(), SystemExit(1), OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("written", [b"", NEW])
def test_what_is_broken_off_leaves_the_old_content(target: Path, fault: BaseException, written: bytes) -> None:
    with pytest.raises(type(fault)):
        break_off(target, written, fault)
    with pytest.raises(type(fault)), staged(target, written):
        raise fault
    assert target.read_bytes() == OLD
    assert names(target.parent) == {target.name}


@pytest.mark.parametrize("most", [0, 50_000])
def test_a_full_disk_leaves_the_old_content(target: Path, most: int) -> None:
    """A limit on the size of files stands for the disk."""
    told, _ = python(FULL_DISK, target, most).communicate()
    assert told == "File too large\n" * 4
    assert target.read_bytes() == OLD
    assert names(target.parent) == {target.name}


@EACH_WAY
def test_a_folder_is_not_replaced(tmp_path: Path, replace: Callable[[Path, bytes, bool], None]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(IsADirectoryError):
        replace(folder, NEW, False)
    assert names(tmp_path) == {"folder"}


@pytest.mark.parametrize("writers", [8])
def test_writers_at_once_leave_the_content_of_one(target: Path, writers: int) -> None:
    contents = [bytes([number]) * 200_000 for number in range(writers)]
    threads = [threading.Thread(target=replace_bytes, args=(target, content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() in contents
    assert names(target.parent) == {target.name}


def test_contents_that_wait_take_their_places_together(target: Path) -> None:
    other = target.with_name("other.json")
    with staged(target, NEW) as put, staged(other, NEW) as put_other:
        assert target.read_bytes() == OLD
        assert not other.exists()
        put()
        put_other()
        assert target.read_bytes() == other.read_bytes() == NEW
    with staged(target, OLD):
        pass  # never put there
    assert target.read_bytes() == NEW
    assert names(target.parent) == {target.name, other.name}


@pytest.mark.parametrize("name", ["n" * 255, "你" * 85, "é" * 127, os.fsdecode(b"\xff" * 255)])
def test_a_name_may_have_its_longest_length(tmp_path: Path, name: str) -> None:
    replace_bytes(tmp_path / name, NEW)
    assert names(tmp_path) == {name}


def test_what_a_killed_writer_left_is_removed_by_the_next(target: Path) -> None:
    dead = begun(target)
    (left,) = names(target.parent) - {target.name}
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    elsewhere = target.with_name(left.replace("partial-", "partial-another.machine."))
    other = target.with_name(left.replace("file", "files"))
    for kept in (elsewhere, other):
        kept.write_bytes(OLD)
    assert all(is_partial(target.with_name(name)) for name in (left, elsewhere.name, other.name))
    assert not is_partial(target)
    replace_bytes(target, NEW)
    assert names(target.parent) == {target.name, elsewhere.name, other.name}


def test_a_writer_that_is_under_way_is_left_alone(target: Path) -> None:
    alive = begun(target)
    replace_bytes(target, NEW)
    assert target.read_bytes() == NEW
    alive.communicate("")
    assert alive.returncode == 0
    assert target.read_bytes() == b"of another process"
    assert names(target.parent) == {target.name}


def test_what_an_earlier_process_of_this_number_left_is_no_obstacle(target: Path) -> None:
    partial_of(target).write_bytes(OLD * 2)
    replace_bytes(target, NEW)
    assert target.read_bytes() == NEW
    assert names(target.parent) == {target.name}
