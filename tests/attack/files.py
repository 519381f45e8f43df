"""Files: changed tokenizers, checkpoint and service configurations are read or refused, in bounded time and memory."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from random import Random
from typing import Any

from attack.mutations import mutate
from attack.opener import Opener
from attack.outcome import Budget, Outcome
from support.paths import TINY

_PATIENCE = 60.0  # seconds of a case on a busy machine
_DEEP = "[" * 100_000 + "]" * 100_000
_BOMBS: tuple[Any, ...] = ([0] * 10**6, [[]] * 10**6, ["x"] * 10**5, "x" * 10**7, "@", 10**400, 1e308, {"": {"": {}}})
_CONFIGURATION = """\
log_format = "json"
max_requests = 8
queue_limit = 64
drain_timeout = 30.0

[models]
chat = "/mnt/models/chat.bundle"
"""
FILES = {
    "tokenizer": "tokenizer.json",
    "checkpoint": "config.json",
    "configuration": "serve.toml",
}


def hostile_files(bundle: Path, work: Path, seed: int, budget: Budget) -> Outcome:
    """Read changed files of each kind: none crashes, hangs, fills the memory or raises an untyped error."""
    outcome, opener, sound, copy = Outcome("hostile files", seed), Opener(), work / "sound", work / "changed"
    _write_sound(bundle, sound)
    for kind, name in FILES.items():
        result = opener.run(kind, sound / kind / name)
        assert result == "read", f"a sound {kind} is {result}"
    for number in budget.numbers():
        random = Random(f"{seed} {number}")
        kind, name = random.choice([*FILES.items()])
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(sound / kind, copy)
        change = _explode(copy / name, random) if random.random() < 0.3 else mutate(copy, random, name)
        began = time.monotonic()
        result = opener.run(kind, copy / name)
        took = time.monotonic() - began
        fine = result.startswith(("read", "refused")) and took < _PATIENCE
        outcome.note(f"{number} {kind} ({change}), {took:.0f} s", result, fine)
    opener.close()
    for folder in (sound, copy):
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _write_sound(bundle: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(TINY, folder / "checkpoint")
    for kind in ("tokenizer", "configuration"):
        (folder / kind).mkdir()
    shutil.copy(bundle / "tokenizer.json", folder / "tokenizer")
    (folder / "configuration" / "serve.toml").write_text(_CONFIGURATION, "utf-8")


def _explode(file: Path, random: Random) -> str:
    """Replace a value of a file at a random depth by a very large one."""
    bomb = random.choice(_BOMBS)
    text = json.dumps(bomb).replace('"@"', _DEEP)
    if file.suffix == ".json":
        content = file.read_text("utf-8")
        places = [index for index, character in enumerate(content) if character in ":,["]
        place = random.choice(places) + 1
        begin = content[place:].lstrip()
        file.write_text(content[:place] + text + begin[len(begin.split(",")[0].rstrip("]}\n ")) :], "utf-8")
    else:
        file.write_text(f"{file.read_text('utf-8')}\nchat = {text}\n", "utf-8")
    return f"{text[:20]}… of {len(text)} characters"
