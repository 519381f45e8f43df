"""Interrupts: none is lost or delivered too early, and an export that one ends leaves the old or a new bundle."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from spaceport.exporter.interrupts import interrupts_deferred, interrupts_handled, interrupts_recorded
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.cli import run
from support.forked import exit_code, started
from support.paths import TINY

EACH = pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])


@EACH
def test_an_interrupt_is_deferred_until_the_block_has_ended_also_with_an_error(kind: signal.Signals) -> None:
    done: list[str] = []

    def work(error: Exception | None) -> None:
        with interrupts_deferred():
            os.kill(os.getpid(), kind)
            done.append("all of it")
            if error is not None:
                raise error

    with interrupts_handled(lambda number: done.append(f"signal {number}")):
        work(None)
        with pytest.raises(ValueError, match="no"):
            work(ValueError("no"))
    assert done == ["all of it", f"signal {kind}"] * 2


@EACH
def test_a_recorded_interrupt_is_raised_when_the_block_ends(kind: signal.Signals) -> None:
    previous, recorded = signal.getsignal(kind), []

    def work() -> None:
        with interrupts_recorded() as received:
            os.kill(os.getpid(), kind)
            recorded.extend(received)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert recorded == [kind]
    assert signal.getsignal(kind) is previous


def test_outside_the_main_thread_interrupts_have_no_effect() -> None:
    found: list[list[int]] = []

    def work() -> None:
        with interrupts_recorded() as received:
            found.append(received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[]]


def smallest_checkpoint(folder: Path) -> Path:
    """The tiny checkpoint with one layer of random weights: an export of it takes the least time."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    shutil.copytree(TINY, folder)
    LlamaForCausalLM(LlamaConfig.from_pretrained(TINY, num_hidden_layers=1)).save_pretrained(folder)
    return folder


@pytest.mark.nightly
def test_an_export_interrupted_at_any_time_leaves_the_old_bundle_or_a_new_one(tmp_path: Path) -> None:
    """Only a killed one may leave a temporary folder, and the next export removes it."""
    folder = tmp_path / "bundles"
    folder.mkdir()
    command = ["export", str(smallest_checkpoint(tmp_path / "llama")), str(folder / "bundle"), "--overwrite"]
    assert exit_code(started(run, command)) == 0
    began = time.perf_counter()
    assert exit_code(started(run, command)) == 0
    takes = time.perf_counter() - began
    old = open_bundle(folder / "bundle").manifest
    rng = random.Random(7)
    endings = []
    for number in range(60):
        kind = (signal.SIGINT, signal.SIGKILL)[number % 2]
        # two of four tries late in the export, when files are written and moved
        wait = takes * rng.uniform(0.0, 1.0) if number % 4 < 2 else takes * rng.uniform(0.85, 1.1)
        process = started(run, command)
        time.sleep(wait)
        if process.is_alive():
            os.kill(process.pid or 0, kind)
        endings.append(ending := exit_code(process))
        # An interrupt during one of torch's callbacks aborts the process; the bundle must be valid all the same.
        interrupted = (130, -signal.SIGABRT) if kind == signal.SIGINT else (-signal.SIGKILL,)
        assert ending in (0, *interrupted)
        assert open_bundle(folder / "bundle").manifest.signature == old.signature
        leftovers = [file.name for file in folder.iterdir() if file.name != "bundle"]
        assert len(leftovers) <= 1
        assert ending < 0 or not any(f"-{process.pid}-" in name for name in leftovers)
    assert {130, -signal.SIGKILL} <= {*endings}
    assert exit_code(started(run, command)) == 0
    assert [file.name for file in folder.iterdir()] == ["bundle"]
