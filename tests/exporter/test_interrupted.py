"""An interrupted export leaves the old bundle or a whole new one, and an interrupt that can be heard no rubbish."""

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


class Victim:
    """A process that exports when it is told to."""

    def __init__(self, checkpoint: Path, target: Path) -> None:
        script = TESTS / "support" / "interrupted.py"
        arguments = [sys.executable, str(script), str(checkpoint), str(target)]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._line() == "ready"

    def start(self) -> int:
        """Begin an export; the process that does it."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return int(self._line())

    def end(self) -> int:
        """How the export ended: 0, 130 after an interrupt, or minus the signal that killed it."""
        return int(self._line())

    def close(self) -> None:
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


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
def victim(checkpoint: Path, folder: Path) -> Iterator[Victim]:
    victim = Victim(checkpoint, folder / "bundle")
    yield victim
    victim.close()


@pytest.mark.parametrize("tries", TRIES)
def test_an_export_interrupted_at_any_time_leaves_the_old_bundle_or_a_new_one(
    victim: Victim, folder: Path, tries: int
) -> None:
    started = time.perf_counter()
    victim.start()
    assert victim.end() == 0
    takes = time.perf_counter() - started
    print(f"an export takes {takes:.1f} s")
    old = open_bundle(folder / "bundle").manifest
    dice = random.Random(7)
    endings = []
    for number in range(tries):
        kind = (signal.SIGINT, signal.SIGKILL)[number % 2]
        # every second try late in the export, where files are written and put in place
        wait = takes * dice.uniform(0.0, 1.0) if number % 4 < 2 else takes * dice.uniform(0.85, 1.1)
        child = victim.start()
        time.sleep(wait)
        with contextlib.suppress(ProcessLookupError):  # it had ended by itself
            os.kill(child, kind)
        ending = victim.end()
        endings.append(ending)
        # An interrupt that comes while torch is in a callback of its own aborts the process; the bundle is what counts.
        interrupted = (130, -signal.SIGABRT) if kind == signal.SIGINT else (-signal.SIGKILL,)
        assert ending in (0, *interrupted)
        found = open_bundle(folder / "bundle").manifest
        assert found.signature == old.signature
        rubbish = [file.name for file in folder.iterdir() if file.name != "bundle"]
        assert len(rubbish) <= (ending < 0), "only a killed process may leave a folder, and the next export sweeps it"
    assert 130 in endings
    assert -signal.SIGKILL in endings
    victim.start()
    assert victim.end() == 0
    assert [file.name for file in folder.iterdir()] == ["bundle"]
