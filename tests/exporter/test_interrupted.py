"""Interrupted exports leave the old or a complete new bundle; only killed ones may leave a temporary folder."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spaceport.runtime.bundle import open_bundle
from support.paths import TESTS, TINY

TRIES = (4, pytest.param(60, marks=pytest.mark.nightly))


class ExportProcess:
    """A process that runs exports on request."""

    def __init__(self, checkpoint: Path, target: Path) -> None:
        script = TESTS / "support" / "interrupted.py"
        arguments = [sys.executable, str(script), str(checkpoint), str(target)]
        self._popen = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._line() == "ready"

    def start(self) -> int:
        """Start an export; returns the id of the exporting process."""
        assert self._popen.stdin is not None
        self._popen.stdin.write("go\n")
        self._popen.stdin.flush()
        return int(self._line())

    def end(self) -> int:
        """The exit code of the export: 0, 130 after an interrupt, or minus the signal that killed it."""
        return int(self._line())

    def close(self) -> None:
        self._popen.communicate()

    def _line(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interrupted")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with one layer of random weights: an export of it takes the least time."""
    folder = tmp_path_factory.mktemp("checkpoint")
    for file in TINY.iterdir():
        if file.name != "model.safetensors":
            shutil.copy(file, folder)
    config = LlamaConfig.from_pretrained(TINY)
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def process(checkpoint: Path, folder: Path) -> Iterator[ExportProcess]:
    process = ExportProcess(checkpoint, folder / "bundle")
    yield process
    process.close()


@pytest.mark.parametrize("tries", TRIES)
def test_an_export_interrupted_at_any_time_leaves_the_old_bundle_or_a_new_one(
    process: ExportProcess, folder: Path, tries: int
) -> None:
    started = time.perf_counter()
    process.start()
    assert process.end() == 0
    takes = time.perf_counter() - started
    print(f"an export takes {takes:.1f} s")
    old = open_bundle(folder / "bundle").manifest
    rng = random.Random(7)
    endings = []
    for number in range(tries):
        kind = (signal.SIGINT, signal.SIGKILL)[number % 2]
        # two of four tries late in the export, when files are written and moved
        wait = takes * rng.uniform(0.0, 1.0) if number % 4 < 2 else takes * rng.uniform(0.85, 1.1)
        child = process.start()
        time.sleep(wait)
        with contextlib.suppress(ProcessLookupError):  # it has already ended
            os.kill(child, kind)
        ending = process.end()
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
    process.start()
    assert process.end() == 0
    assert [file.name for file in folder.iterdir()] == ["bundle"]
