"""Interrupts: none is lost or delivered too early, and an export that one ends leaves the old or a new bundle."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from spaceport.exporter.interrupts import interrupts_deferred, interrupts_handled, interrupts_recorded
from spaceport.runtime.bundle import open_bundle
from support.killed import Commands, kill, smallest_checkpoint

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


@pytest.mark.nightly
def test_an_export_interrupted_at_any_time_leaves_the_old_bundle_or_a_new_one(tmp_path: Path) -> None:
    """Only a killed one may leave a temporary folder, and the next export removes it."""
    checkpoint, folder = smallest_checkpoint(tmp_path / "llama"), tmp_path / "bundles"
    folder.mkdir()
    command = ["export", str(checkpoint), str(folder / "bundle"), "--overwrite"]
    commands = Commands(command)
    started = time.perf_counter()
    assert commands.run(command) == 0
    takes = time.perf_counter() - started
    old = open_bundle(folder / "bundle").manifest
    rng = random.Random(7)
    endings = []
    for number in range(60):
        kind = (signal.SIGINT, signal.SIGKILL)[number % 2]
        # two of four tries late in the export, when files are written and moved
        wait = takes * rng.uniform(0.0, 1.0) if number % 4 < 2 else takes * rng.uniform(0.85, 1.1)
        child = commands.start(command)
        time.sleep(wait)
        kill(child, kind)
        endings.append(ending := commands.end())
        # An interrupt during one of torch's callbacks aborts the process; the bundle must be valid all the same.
        interrupted = (130, -signal.SIGABRT) if kind == signal.SIGINT else (-signal.SIGKILL,)
        assert ending in (0, *interrupted)
        assert open_bundle(folder / "bundle").manifest.signature == old.signature
        leftovers = [file.name for file in folder.iterdir() if file.name != "bundle"]
        assert len(leftovers) <= (ending < 0)
    assert {130, -signal.SIGKILL} <= {*endings}
    assert commands.run(command) == 0
    assert [file.name for file in folder.iterdir()] == ["bundle"]
    commands.close()
