"""Atomic file: readers see the old or the new content, and failures leave the old content and no other file."""

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

from spaceport.graphs.contract.atomic_file import is_partial, partial_of, replace_bytes, replace_text, staged

OLD, NEW = b"the old content\n" * 100, "the new content ✓\n\r\n".encode() * 100
Way = Callable[[Path, bytes, bool], None]


def as_text(target: Path, content: bytes, durable: bool) -> None:
    replace_text(target, content.decode(), durable)


EACH_WAY = pytest.mark.parametrize("replace", [replace_bytes, as_text])


# argv: a target. Starts to write, prints a line, and waits for the end of its input.
WRITER = """
import sys
from pathlib import Path
from spaceport.graphs.contract.atomic_file import staged
with staged(Path(sys.argv[1]), b"of another process") as put:
    print("writing", flush=True)
    sys.stdin.read()
    put()
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def started_writer(target: Path) -> subprocess.Popen[str]:
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
def test_a_file_gets_its_new_content_and_no_temporary_file_remains(target: Path, replace: Way, durable: bool) -> None:
    other = target.with_name("another")
    partial_of(target).write_bytes(OLD * 2)  # of an earlier process with this id
    replace(target, NEW, durable)
    replace(other, NEW, durable)
    assert target.read_bytes() == other.read_bytes() == NEW
    assert names(target.parent) == {target.name, other.name}
    plain = target.with_name("plain")
    plain.write_bytes(NEW)
    assert target.stat().st_mode == plain.stat().st_mode
    folder = target.with_name("folder")
    folder.mkdir()
    with pytest.raises(IsADirectoryError):
        replace(folder, NEW, durable)
    assert names(target.parent) == {target.name, other.name, plain.name, folder.name}


def test_a_reader_sees_the_old_or_the_new_content_at_every_moment(target: Path) -> None:
    done, wrong = threading.Event(), list[bytes]()

    def watch() -> None:
        while not done.is_set():
            if (content := target.read_bytes()) not in (OLD, NEW):
                wrong.append(content)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(300):
        replace_bytes(target, NEW if number % 2 else OLD)
    done.set()
    watcher.join()
    assert wrong == []


@pytest.mark.parametrize("fault", [ValueError("no"), KeyboardInterrupt(), SystemExit(1), OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("written", [b"", NEW])
def test_a_failed_write_leaves_the_old_content(target: Path, fault: BaseException, written: bytes) -> None:
    with pytest.raises(type(fault)), staged(target, written):
        raise fault
    assert target.read_bytes() == OLD
    assert names(target.parent) == {target.name}


def test_concurrent_writers_leave_the_content_of_one(target: Path) -> None:
    contents = [bytes([number]) * 200_000 for number in range(8)]
    threads = [threading.Thread(target=replace_bytes, args=(target, content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() in contents
    assert names(target.parent) == {target.name}


def test_several_staged_files_are_replaced_together(target: Path) -> None:
    other = target.with_name("other.json")
    with staged(target, NEW) as put, staged(other, NEW) as put_other:
        assert target.read_bytes() == OLD
        assert not other.exists()
        put()
        put_other()
        assert target.read_bytes() == other.read_bytes() == NEW
    with staged(target, OLD):
        pass  # not replaced
    assert target.read_bytes() == NEW
    assert names(target.parent) == {target.name, other.name}


@pytest.mark.parametrize("name", ["n" * 255, "你" * 85, "é" * 127, os.fsdecode(b"\xff" * 255)])
def test_a_file_name_of_the_maximum_length_can_be_written(tmp_path: Path, name: str) -> None:
    replace_bytes(tmp_path / name, NEW)
    assert names(tmp_path) == {name}


def test_the_remains_of_a_killed_writer_are_removed_by_the_next_and_a_running_one_is_not_disturbed(
    target: Path,
) -> None:
    dead, alive = started_writer(target), started_writer(target)
    left = next(name for name in names(target.parent) if f"-{dead.pid}-" in name)
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    elsewhere = target.with_name(left.replace("partial-", "partial-another.machine."))
    other = target.with_name(left.replace("file", "files"))
    for file in (elsewhere, other):
        file.write_bytes(OLD)
    assert all(is_partial(target.with_name(name)) for name in (left, elsewhere.name, other.name))
    assert not is_partial(target)
    replace_bytes(target, NEW)
    assert target.read_bytes() == NEW
    assert left not in names(target.parent)
    alive.communicate("")
    assert alive.returncode == 0
    assert target.read_bytes() == b"of another process"
    assert names(target.parent) == {target.name, elsewhere.name, other.name}
