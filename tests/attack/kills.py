"""Kills: exports that are killed at any moment leave the old bundle or a whole new one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

from attack.opener import Opener
from attack.outcome import Budget, Outcome
from support.paths import TESTS, TINY

_PATIENCE = 120.0  # seconds to open a bundle on a busy machine


def killed_exports(work: Path, seed: int, budget: Budget) -> Outcome:
    """Kill exports that replace a bundle; after each, it opens and has its output."""
    outcome, random, opener = Outcome("kills of exports", seed), Random(seed), Opener(_PATIENCE)
    target = work / "killed.bundle"
    command = [sys.executable, str(TESTS / "support" / "interrupted.py"), str(TINY), str(target)]
    began = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as exporting:
        assert exporting.stdin is not None
        assert exporting.stdout is not None
        exporting.stdout.readline()  # ready
        longest = time.monotonic() - began
        expected = opener.open(target)
        for number in budget.numbers():
            exporting.stdin.write("\n")
            exporting.stdin.flush()
            child = int(exporting.stdout.readline())
            seconds = random.uniform(0, longest)
            time.sleep(seconds)
            with suppress(ProcessLookupError):  # it may have ended
                os.kill(child, signal.SIGKILL)
            code = int(exporting.stdout.readline())
            result = opener.open(target)
            name = "whole after the kill" if code == -signal.SIGKILL else "whole after the export"
            outcome.note(f"{number} after {seconds:.2f} s", name if result == expected else result, result == expected)
        exporting.stdin.close()
    opener.close()
    return outcome
