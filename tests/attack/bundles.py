"""Bundles: mutated ones must be refused with a typed error; whole ones that are swapped must never be mixed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

from attack.mutations import mutate, repair
from attack.opener import Opener
from attack.outcome import Budget, Outcome

_PATIENCE = 120.0  # seconds of a case on a busy machine
_TOKENS = "tokens"


def mutated_bundles(bundle: Path, work: Path, seed: int, budget: Budget) -> Outcome:
    """Open mutated copies, every second one with repaired hashes.

    A copy whose hashes were not repaired is refused, or has the same output. With repaired hashes it is another bundle,
    which may have another output, but causes no crash, no hang and no untyped error.
    """
    outcome, opener = Outcome("mutated bundles", seed), Opener(_PATIENCE)
    expected, copy = opener.open(bundle), work / "mutated"
    if not expected.startswith(_TOKENS):
        raise ValueError(f"{bundle} cannot be opened: {expected}")
    for number in budget.numbers():
        random = Random(f"{seed} {number}")
        _remove(copy)
        shutil.copytree(bundle, copy)
        change = mutate(copy, random)
        repaired = bool(number % 2) and repair(copy)
        result = opener.open(copy)
        name, fine = result, result.startswith("refused")
        if result.startswith(_TOKENS):
            same = result == expected
            name, fine = "same output" if same else "other output", same or repaired
        outcome.note(f"{number} ({change}{', repaired' if repaired else ''})", name, fine)
        outcome.figures["repaired"] = str(int(outcome.figures.get("repaired", 0)) + repaired)
    opener.close()
    _remove(copy)
    return outcome


def swapped_bundles(bundle: Path, work: Path, seed: int, budget: Budget) -> Outcome:
    """Open a path while another process exchanges two bundles there: weights and manifest must belong together."""
    outcome, opener = Outcome("swaps", seed), Opener(_PATIENCE)
    first, second = work / "swap" / "first", work / "swap" / "second"
    _remove(work / "swap")
    for folder in (first, second):
        shutil.copytree(bundle, folder)
    data = bytearray((second / "model.onnx.data").read_bytes())
    for index in range(3, len(data), 4):  # the sign of every float32
        data[index] ^= 0x80
    (second / "model.onnx.data").write_bytes(data)
    repair(second)
    whole = {opener.open(first), opener.open(second)}
    if len(whole) != 2 or not all(result.startswith(_TOKENS) for result in whole):
        raise ValueError(f"the two bundles have the same output: {whole}")
    with subprocess.Popen([sys.executable, "-c", _SWAP, str(first), str(second), str(seed)]) as swapping:
        for number in budget.numbers():
            result = opener.open(first)
            mixed = result.startswith(_TOKENS) and result not in whole
            name = "mixed" if mixed else "whole" if result in whole else result
            outcome.note(str(number), name, result in whole or result.startswith("refused"))
        swapping.kill()
    opener.close()
    _remove(work / "swap")
    return outcome


_SWAP = """
import os, random, sys, time
first, second, seed = sys.argv[1:]
random.seed(seed)
while True:
    os.rename(first, first + ".old")
    os.rename(second, first)
    os.rename(first + ".old", second)
    time.sleep(random.uniform(0, 0.05))
"""


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
