"""Data of the demo model: questions about functions and source text of the standard library, one file in ten held out."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

from recipes.functions import MOST_ITEMS, Function, answer, functions_in, invented, question

WINDOW = 540  # characters of a window of source text: about 180 tokens
LONGEST_SIGNATURE = 200  # characters
UNFORKED_COPIES = 0.17  # fraction of the lists that are repeated with "fork": false

# Tests, data, generated tables, and modules that some Python builds lack
_SKIPPED = {
    *("test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "pydoc_data", "encodings", "distutils"),
    *("ensurepip", "msilib", "site-packages", "__pycache__", "__phello__", "entities.py", "stringprep.py"),
    *("sre_constants.py", "turtle.py", "this.py", "antigravity.py"),
}


def read_sources() -> dict[str, str]:
    """The modules of the running Python's standard library, by path."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = {}
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder)
        if path.parts[0].removesuffix(".py") in sys.stdlib_module_names and not _SKIPPED.intersection(path.parts):
            with tokenize.open(file) as opened:
                found[path.as_posix()] = opened.read()
    return found


def is_held_out(path: str) -> bool:
    """Whether a module is held out of training; the same on every machine."""
    return hashlib.sha256(path.encode()).digest()[0] % 10 == 0


def write_data(folder: Path, sources: dict[str, str], lists: int, sentences: int, texts: int) -> list[str]:
    """Write `train.jsonl` and `heldout.jsonl`, with at most these numbers of samples; texts that a tokenizer can learn from.

    Held out are chats about functions and pieces of source text, in turns; no signature is in both files.
    """
    dice = Random(0)
    own = {path: text for path, text in sources.items() if not is_held_out(path)}
    held_out = {path: text for path, text in sources.items() if is_held_out(path)}
    trained = _functions(own.values())
    foreign = {text: one for text, one in _functions(held_out.values()).items() if text not in trained}
    listed = dict(islice(((text, one) for text, one in trained.items() if one.is_listed), lists))
    for function in invented(list(trained.values()), dice):
        if len(listed) >= lists:
            break
        if function.text not in foreign and len(function.text) <= LONGEST_SIGNATURE:
            listed.setdefault(function.text, function)
    short = _shuffled((one for one in trained.values() if not one.is_listed), dice)[:sentences]
    windows = _shuffled((window for text in own.values() for window in windows_of(text)), dice)[:texts]
    chats = [_chat(one) for one in (*listed.values(), *short)]
    copies = [{**_chat(one), "fork": False} for one in listed.values() if dice.random() < UNFORKED_COPIES]
    pieces = [{"text": window, "ends": False} for window in windows]  # of longer texts: no end token follows
    _write(folder / "train.jsonl", _shuffled([*chats, *copies, *pieces], dice))
    others = [{"text": window, "ends": False} for text in held_out.values() for window in windows_of(text)]
    pairs = zip(map(_chat, _shuffled(foreign.values(), dice)), _shuffled(others, dice), strict=False)
    _write(folder / "heldout.jsonl", chain.from_iterable(pairs))
    learned = islice(listed.values(), len(windows) // 2)
    return [*windows, *(f"user\n{question(one)}\nassistant\n{answer(one)}" for one in learned)]


def windows_of(text: str) -> Iterator[str]:
    """Pieces of whole lines; those that are too short, too long or not ASCII are dropped."""
    found = [""]
    for line in text.splitlines(keepends=True):
        if found[-1] and len(found[-1]) + len(line) > WINDOW:
            found.append("")
        found[-1] += line
    yield from (window for window in found if WINDOW // 2 <= len(window) <= WINDOW and window.isascii())


def _functions(sources: Iterable[str]) -> dict[str, Function]:
    """Usable functions by signature; an answer with a link or too many items would not fork."""
    found = {one.text: one for source in sources for one in functions_in(source) if len(one.parameters) <= MOST_ITEMS}
    usable = (
        text for text in found if len(text) <= LONGEST_SIGNATURE and text.isascii() and "http" not in text.lower()
    )
    return {text: found[text] for text in usable}


def _shuffled(items: Iterable[Any], dice: Random) -> list[Any]:
    """The items in a random order."""
    found = list(items)
    return dice.sample(found, len(found))


def _chat(function: Function) -> dict[str, Any]:
    turns = (("user", question(function)), ("assistant", answer(function)))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _write(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
