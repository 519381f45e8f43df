"""Recorder: which tests reach which expressions, and how long each test takes.

A copy of the checkout calls `reached` before each statement with a mutation; processes that tests start do so too,
because pytest names the test that runs in the environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from mutants.mutations import Mutation, Site

FOLDER = "MUTANTS_REACHED"  # not SPACEPORT_…, of which commands warn
FAILURES = "MUTANTS_FAILURES"  # file for the tests that fail

_REACHED = '''"""Written by the recorder of mutants."""
import os

_seen = set()


def reached(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if test and (number, test) not in _seen:
        _seen.add((number, test))
        with open(os.path.join(os.environ["MUTANTS_REACHED"], f"{os.getpid()}.reached"), "a") as file:
            file.write(f"{number} {test}\\n")
'''


def copied(root: Path, target: Path) -> Path:
    """A copy of a checkout as it is now, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    shutil.rmtree(target, ignore_errors=True)
    for name in listed.stdout.decode().split("\0"):
        source, copy = root / name, target / name
        if name and (source.is_file() or source.is_symlink()):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)
    subprocess.run(["git", "init", "-q"], cwd=target, check=True)  # some tests ask git for the files
    subprocess.run(["git", "add", "-A"], cwd=target, check=True)
    return target


def record(copy: Path, sites: Sequence[Site], reached: Path, options: Sequence[str], jobs: int) -> None:
    """Run the suite in a copy of the checkout, writing into `reached` which tests come by each site."""
    by_file = defaultdict[str, list[tuple[int, Site]]](list)
    for number, site in enumerate(sites):
        by_file[site.mutation.file].append((number, site))
    for file, numbered in by_file.items():
        lines = (copy / file).read_text("utf-8").splitlines()
        for number, site in sorted(numbered, key=lambda pair: -pair[1].line):
            call = f"{' ' * site.column}__import__('mutants_reached').reached({number})"
            lines.insert(site.line - 1, call)
        (copy / file).write_text("\n".join(lines) + "\n", "utf-8")
    shutil.rmtree(reached, ignore_errors=True)
    reached.mkdir(parents=True)
    (reached / "mutants_reached.py").write_text(_REACHED)
    (reached / "mutations.json").write_text(json.dumps([asdict(site.mutation) for site in sites]))
    command = [
        "-p",
        "mutants.recorder",
        "-q",
        "-n",
        str(jobs),
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        *options,
    ]
    with (reached / "pytest.log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", "pytest", *command],
            cwd=copy,
            env={**environment(copy, reached), FOLDER: str(reached)},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,  # tests of the sources themselves fail on the added lines
        )


def environment(copy: Path, *folders: Path) -> dict[str, str]:
    """Variables with which Python imports the packages of a copy."""
    paths = (copy / "src", copy / "tests", *folders)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def tests_of(reached: Path) -> dict[Mutation, list[str]]:
    """The tests that come by each mutation, the quickest first."""
    mutations = [Mutation(**fields) for fields in json.loads((reached / "mutations.json").read_text())]
    seconds = dict[str, float]()
    for file in reached.glob("*.seconds"):
        for line in file.read_text().splitlines():
            test, taken = json.loads(line)
            seconds[test] = taken
    tests = defaultdict[Mutation, set[str]](set)
    for file in reached.glob("*.reached"):
        for line in file.read_text().splitlines():
            number, _, test = line.partition(" ")
            if test in seconds:
                tests[mutations[int(number)]].add(test)
    return {mutation: sorted(found, key=lambda test: (seconds[test], test)) for mutation, found in tests.items()}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    begin = time.monotonic()
    outcome = yield
    if folder := os.environ.get(FOLDER):
        with (Path(folder) / f"{os.getpid()}.seconds").open("a") as file:
            file.write(json.dumps([item.nodeid, round(time.monotonic() - begin, 3)]) + "\n")
    return outcome


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note_failure(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_failure(report)


def _note_failure(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.failed and (file := os.environ.get(FAILURES)):
        with Path(file).open("a") as failures:
            failures.write(f"{report.nodeid}\n")
