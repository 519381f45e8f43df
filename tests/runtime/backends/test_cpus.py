"""CPUs: limits of control groups, in both versions, inside a container and outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from spaceport.runtime.backends import cpus
from spaceport.runtime.backends.cpus import cpu_limit, engine_threads, usable_cpus

V2 = "0::/pods/one\n"
V1 = "11:memory:/pods/one\n4:cpu,cpuacct:/pods/one\n1:name=systemd:/pods/one\n"


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
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
    assert cpu_limit(system(tmp_path, groups, files)) == expected


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert cpu_limit(tmp_path) is None


@pytest.mark.parametrize(
    ("asked", "limit", "threads", "usable"),
    [(0, None, 0, 8), (0, 3, 3, 3), (0, 8, 0, 8), (0, 64, 0, 8), (5, 3, 5, 3), (2, None, 2, 8)],
)
def test_an_engine_gets_as_many_threads_as_the_limit_allows(
    monkeypatch: pytest.MonkeyPatch, asked: int, limit: int | None, threads: int, usable: int
) -> None:
    monkeypatch.setattr(cpus, "cpu_limit", lambda: limit)
    monkeypatch.setattr(cpus, "_affinity", lambda: 8)
    assert engine_threads(asked) == threads
    assert usable_cpus() == usable
