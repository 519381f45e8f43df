"""Interrupted exports leave the old or a complete new bundle; only killed ones may leave a temporary folder."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spaceport.runtime.bundle import open_bundle
from support.killed import Commands, kill, smallest_checkpoint

TRIES = (4, pytest.param(60, marks=pytest.mark.nightly))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interrupted")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> list[str]:
    checkpoint = smallest_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama")
    return ["export", str(checkpoint), str(folder / "bundle"), "--overwrite"]


@pytest.fixture(scope="module")
def commands(command: list[str]) -> Iterator[Commands]:
    commands = Commands(command)
    yield commands
    commands.close()


@pytest.mark.parametrize("tries", TRIES)
def test_an_export_interrupted_at_any_time_leaves_the_old_bundle_or_a_new_one(
    commands: Commands, command: list[str], folder: Path, tries: int
) -> None:
    started = time.perf_counter()
    assert commands.run(command) == 0
    takes = time.perf_counter() - started
    print(f"an export takes {takes:.1f} s")
    old = open_bundle(folder / "bundle").manifest
    rng = random.Random(7)
    endings = []
    for number in range(tries):
        kind = (signal.SIGINT, signal.SIGKILL)[number % 2]
        # two of four tries late in the export, when files are written and moved
        wait = takes * rng.uniform(0.0, 1.0) if number % 4 < 2 else takes * rng.uniform(0.85, 1.1)
        child = commands.start(command)
        time.sleep(wait)
        kill(child, kind)
        ending = commands.end()
        endings.append(ending)
        # An interrupt during one of torch's callbacks aborts the process; the bundle must be valid all the same.
        interrupted = (130, -signal.SIGABRT) if kind == signal.SIGINT else (-signal.SIGKILL,)
        assert ending in (0, *interrupted)
        found = open_bundle(folder / "bundle").manifest
        assert found.signature == old.signature
        leftovers = [file.name for file in folder.iterdir() if file.name != "bundle"]
        assert len(leftovers) <= (ending < 0), "only a killed process may leave a folder, and the next export sweeps it"
    assert 130 in endings
    assert -signal.SIGKILL in endings
    assert commands.run(command) == 0
    assert [file.name for file in folder.iterdir()] == ["bundle"]
