"""Private files: state that another user could have written is not used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from spaceport.runtime.backends.private_files import append_private, problem_of, read_private, replace_private


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "state" / "built-engines"
    append_private(file, b"one\n")
    append_private(file, b"two\n")
    return file


def test_what_was_appended_can_be_read_by_this_user_alone(file: Path) -> None:
    assert read_private(file) == b"one\ntwo\n"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert problem_of(file.parent) is None
    assert problem_of(file.parent / "nothing") is None
    assert read_private(file.with_name("nothing")) is None


def test_a_replaced_file_can_be_read_by_this_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "state" / "table"
    previous = os.umask(0)
    try:
        for content in (b"one", b"two"):
            replace_private(file, content)
    finally:
        os.umask(previous)
    assert read_private(file) == b"two"
    assert read_private(file, 2) == b"tw"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    file.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write to it"):
        replace_private(file, b"three")
    assert file.read_bytes() == b"two"


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


UNSAFE: dict[str, Callable[[Path], object]] = {
    "a file that others may write": lambda file: file.chmod(0o622),
    "a folder that others may write": lambda file: file.parent.chmod(0o777),
    "a linked file": link,
    "a linked folder": lambda file: link(file.parent),
    "a FIFO": fifo,
}


@pytest.mark.parametrize("unsafe", UNSAFE)
def test_what_another_user_could_have_written_is_not_used(file: Path, unsafe: str) -> None:
    UNSAFE[unsafe](file)
    assert read_private(file) is None
    with pytest.raises(OSError, match=r"\w"):
        append_private(file, b"three\n")
    assert (problem_of(file.parent) is not None) == ("folder" in unsafe)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to another user")
@pytest.mark.parametrize("folder", [True, False])
def test_what_belongs_to_another_user_is_not_used(file: Path, folder: bool) -> None:
    os.chown(file.parent if folder else file, 12345, -1)
    assert read_private(file) is None
    with pytest.raises(PermissionError, match="belongs to another user"):
        append_private(file, b"three\n")
