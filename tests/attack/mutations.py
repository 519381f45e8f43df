"""Mutations: random changes of a bundle's files, from a flipped bit to a missing file; all are refused or make no difference."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from attack.damaged_graphs import damage
from attack.opener import Opener
from attack.outcome import Budget, Outcome
from spaceport.graphs.contract.manifest import MANIFEST_FILE, with_digest

_VALUES = (0, -1, 1, 2**31, 2**63, 10**30, 0.5, True, None, "", "x" * 10_000, "../x", "\0", [], {}, [[]])


def mutated_bundles(bundle: Path, work: Path, seed: int, budget: Budget) -> Outcome:
    """Open mutated copies, every second one with repaired hashes.

    A copy whose hashes were not repaired is refused, or has the same output. With repaired hashes it is another bundle,
    which may have another output, but causes no crash, no hang and no untyped error.
    """

    def change(copy: Path, number: int, random: Random) -> tuple[str, bool]:
        what = mutate(copy, random)
        return what, bool(number % 2) and repair(copy)

    return _opened(Outcome("mutated bundles", seed), bundle, work, budget, change)


def damaged_bundles(bundle: Path, work: Path, seed: int, budget: Budget) -> Outcome:
    """Open copies of a native bundle with a damaged graph, weights or signature, all with repaired hashes."""

    def change(copy: Path, _: int, random: Random) -> tuple[str, bool]:
        what = damage(copy, random)
        return what, repair(copy)

    return _opened(Outcome("damaged native bundles", seed), bundle, work, budget, change)


def _opened(
    outcome: Outcome, bundle: Path, work: Path, budget: Budget, change: Callable[[Path, int, Random], tuple[str, bool]]
) -> Outcome:
    """Open copies that were changed in different ways; `change` returns what it did, and whether the hashes are right."""
    opener, copy = Opener(), work / "mutated"
    expected = opener.run(bundle)
    assert expected.startswith("tokens"), f"{bundle} cannot be opened: {expected}"
    for number in budget.numbers():
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(bundle, copy)
        what, repaired = change(copy, number, Random(f"{outcome.seed} {number}"))
        result = opener.run(copy)
        name, fine = result, result.startswith("refused")
        if result.startswith("tokens"):
            same = result == expected
            name, fine = "same output" if same else "other output", same or repaired
        outcome.note(f"{number} ({what}{', repaired' if repaired else ''})", name, fine)
    opener.close()
    shutil.rmtree(copy, ignore_errors=True)
    return outcome


_KINDS = ("flip", "flip", "truncate", "extend", "zero", "delete", "folder", "endless", "pipe", "empty")


def mutate(folder: Path, random: Random) -> str:
    """Change a file of a bundle, often an entry of its manifest; returns what was done."""
    if random.random() < 0.3:
        return _edit_entries(folder / MANIFEST_FILE, random)
    file = random.choice(sorted(file for file in folder.rglob("*") if file.is_file()))
    content, kind = bytearray(file.read_bytes()), random.choice(_KINDS)
    begin = random.randrange(max(1, len(content)))
    if kind == "flip" and content:
        for _ in range(random.choice((1, 1, 1, 8))):
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    elif kind == "truncate":
        del content[begin:]
    elif kind == "extend":
        content += random.randbytes(random.randrange(1, 200))
    elif kind == "zero":
        content[begin : begin + 64] = bytes(len(content[begin : begin + 64]))
    file.unlink()
    replaced = {
        "delete": lambda: None,
        "folder": file.mkdir,
        "endless": lambda: file.symlink_to("/dev/zero"),
        "pipe": lambda: os.mkfifo(file),
        "empty": file.touch,
    }
    replaced.get(kind, lambda: file.write_bytes(content))()
    return f"{kind} {file.name} at {begin}"


def repair(folder: Path) -> bool:
    """Make the hashes and sizes of a manifest those of the changed files; returns whether that was possible."""
    file = folder / MANIFEST_FILE
    if not file.is_file():  # /dev/zero, for one, never ends
        return False
    try:
        entries = json.loads(file.read_bytes())
        for name, record in entries["files"].items():
            content = (folder / name).read_bytes() if (folder / name).is_file() else b""
            record |= {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        entries.pop("sha256", None)
        file.write_bytes(with_digest(entries))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _edit_entries(file: Path, random: Random) -> str:
    """Change, remove or add an entry of a JSON file at a random depth."""
    entries = json.loads(file.read_bytes())
    inner, path = entries, []
    while keys := list(inner) if isinstance(inner, dict) else list(range(len(inner))):
        path.append(key := random.choice(keys))
        if isinstance(inner[key], dict | list) and inner[key] and random.random() < 0.8:
            inner = inner[key]
            continue
        if random.random() < 0.2:
            del inner[key]
        else:
            inner[key] = random.choice(_VALUES)
        break
    else:
        inner["new"] = 1
    file.write_text(json.dumps(entries, indent=2))
    return f"entry {path}"
