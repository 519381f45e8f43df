"""Machine: the CPUs that a container allows, state that no other user can have written, and no usage data of libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spaceport.runtime.backends import machine
from spaceport.runtime.backends.machine import cpu_limit, engine_threads, usable_cpus
from spaceport.runtime.backends.private_files import append_private, problem_of, read_private, replace_private

V2 = "0::/pods/one\n"
V1 = "11:memory:/pods/one\n4:cpu,cpuacct:/pods/one\n1:name=systemd:/pods/one\n"


def with_files(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A root folder with the control groups of a process and some files of /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, content in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    return root


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (V2, {"pods/one/cpu.max": "200000 100000"}, 2),
        (V2, {"pods/one/cpu.max": "150000 100000"}, 2),  # rounded up
        (V2, {"pods/one/cpu.max": "20000 100000"}, 1),
        (V2, {"pods/one/cpu.max": "max 100000"}, None),
        (V2, {"pods/one/cpu.max": "max 100000", "pods/cpu.max": "300000 100000"}, 3),  # of the group around it
        (V2, {"pods/one/cpu.max": "500000 100000", "pods/cpu.max": "300000 100000"}, 3),
        (V2, {"pods/two/cpu.max": "100000 100000"}, None),  # of another group
        ("0::/\n", {"cpu.max": "400000 100000"}, 4),  # in a container with a name space of its own
        (V1, {"cpu,cpuacct/pods/one/cpu.cfs_quota_us": "250000", "cpu,cpuacct/pods/one/cpu.cfs_period_us": "50000"}, 5),
        (V1, {"cpu/pods/one/cpu.cfs_quota_us": "-1", "cpu/pods/one/cpu.cfs_period_us": "100000"}, None),
        (V1, {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),  # docker: mounted as the root
        (V1, {"memory/pods/one/cpu.cfs_quota_us": "100000", "memory/pods/one/cpu.cfs_period_us": "100000"}, None),
        (V2, {"pods/one/cpu.max": "nonsense"}, None),
        (V2, {"pods/one/cpu.max": "100000 0"}, None),
        ("nonsense\n", {"cpu.max": "100000 100000"}, 1),  # what is mounted still counts
        ("", {}, None),
    ],
)
def test_the_limit_is_that_of_the_group_and_those_around_it(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int | None
) -> None:
    assert cpu_limit(tmp_path / "no control groups") is None
    assert cpu_limit(with_files(tmp_path, groups, files)) == expected


@pytest.mark.parametrize(
    ("asked", "limit", "threads", "usable"),
    [(0, None, 0, 8), (0, 3, 3, 3), (0, 8, 0, 8), (0, 64, 0, 8), (5, 3, 5, 3), (2, None, 2, 8)],
)
def test_an_engine_gets_as_many_threads_as_the_limit_allows(
    monkeypatch: pytest.MonkeyPatch, asked: int, limit: int | None, threads: int, usable: int
) -> None:
    monkeypatch.setattr(machine, "cpu_limit", lambda: limit)
    monkeypatch.setattr(machine, "_affinity", lambda: 8)
    assert (engine_threads(asked), usable_cpus()) == (threads, usable)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "state" / "built-engines"
    append_private(file, b"one\n")
    append_private(file, b"two\n")
    return file


def test_private_files_can_be_read_by_this_user_alone_whatever_the_umask(file: Path) -> None:
    assert read_private(file) == b"one\ntwo\n"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert problem_of(file.parent) is None
    assert problem_of(file.parent / "nothing") is None
    assert read_private(file.with_name("nothing")) is None
    table, previous = file.parent / "tables" / "table", os.umask(0)
    try:
        for content in (b"one", b"two"):
            replace_private(table, content)
    finally:
        os.umask(previous)
    assert (read_private(table), read_private(table, 2)) == (b"two", b"tw")
    assert (table.stat().st_mode & 0o777, table.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


UNSAFE: dict[str, Callable[[Path], object]] = {
    "a file that others may write": lambda file: file.chmod(0o602),
    "a file that a group may write": lambda file: file.chmod(0o620),
    "a folder that others may write": lambda file: file.parent.chmod(0o777),
    "a linked file": link,
    "a linked folder": lambda file: link(file.parent),
    "a FIFO": fifo,
    "a file of another user": lambda file: os.chown(file, 12345, -1),
    "a folder of another user": lambda file: os.chown(file.parent, 12345, -1),
}


@pytest.mark.parametrize("unsafe", UNSAFE)
def test_what_another_user_could_have_written_is_not_used(file: Path, unsafe: str) -> None:
    if "another user" in unsafe and os.geteuid() != 0:
        pytest.skip("only root may give files to another user")
    UNSAFE[unsafe](file)
    assert read_private(file) is None
    with pytest.raises(OSError, match="belongs to another user" if "another user" in unsafe else r"\w"):
        append_private(file, b"three\n")
    assert (problem_of(file.parent) is not None) == ("folder" in unsafe)
    if unsafe == "a folder that others may write":
        with pytest.raises(PermissionError, match="other users may write to it"):
            replace_private(file, b"three")


@pytest.mark.parametrize(("choice", "setting"), [({}, "1"), ({"ORT_DISABLE_TELEMETRY": "0"}, "0")])
def test_onnxruntime_collects_no_usage_data_unless_the_user_lets_it(choice: dict[str, str], setting: str) -> None:
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "PATH", "LD_PRELOAD") if name in os.environ}
    command = [sys.executable, "-c", "import os, spaceport; print(os.environ['ORT_DISABLE_TELEMETRY'])"]
    done = subprocess.run(command, env={**kept, **choice}, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, setting), done.stderr
