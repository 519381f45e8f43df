"""Corpus: training data of the demo model, chats about functions and source text of the standard library."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.signatures import FEWEST_ITEMS, MOST_ITEMS, Function, answer, functions_in, invent, pool_of, question

TRAIN_FILE = "train.jsonl"  # chats and text, shuffled
HELD_OUT_FILE = "heldout.jsonl"  # chats about functions in held-out files
HELD_OUT_TEXT_FILE = "heldout_text.jsonl"  # source text of held-out files

LISTS = 32_000  # chats answered with a list, real and invented functions
SENTENCES = 5_000  # chats answered with a sentence
TEXTS = 12_000  # windows of source text
UNFORKED_COPIES = 0.17  # fraction of the lists that are repeated with "fork": false
WINDOW = 540  # characters of a window of text: about 180 tokens
LONGEST_SIGNATURE = 200  # characters
HELD_OUT = 10  # one file in 10

# Tests, data, generated tables, and modules that some Python builds lack
_SKIPPED_FOLDERS = {
    *("test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "pydoc_data", "encodings"),
    *("distutils", "ensurepip", "msilib", "site-packages", "__pycache__", "__phello__"),
}
_SKIPPED_FILES = {"html/entities.py", "stringprep.py", "sre_constants.py", "turtle.py", "this.py", "antigravity.py"}


@dataclass(frozen=True)
class Source:
    """A module: its path in the standard library and its text."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the module is held out of training; the same on every machine."""
        return hashlib.sha256(self.path.encode()).digest()[0] % HELD_OUT == 0


def stdlib_paths() -> list[Path]:
    """Files of the standard library used for training and evaluation, sorted by path."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(folder.rglob("*.py")) if _used(path.relative_to(folder))]


def read_source(file: Path) -> Source:
    """Read a module of the standard library."""
    with tokenize.open(file) as opened:
        return Source(file.relative_to(sysconfig.get_path("stdlib")).as_posix(), opened.read())


def _used(path: Path) -> bool:
    known = path.parts[0].removesuffix(".py") in sys.stdlib_module_names
    return known and not _SKIPPED_FOLDERS.intersection(path.parts) and path.as_posix() not in _SKIPPED_FILES


@dataclass(frozen=True)
class Corpus:
    """Training and held-out data; no signature is in both."""

    lists: tuple[Function, ...]
    sentences: tuple[Function, ...]
    texts: tuple[str, ...]
    held_out: tuple[Function, ...]
    held_out_texts: tuple[str, ...]

    @property
    def vocabulary(self) -> Iterator[str]:
        """Texts for training the tokenizer: equal numbers of chats and source windows."""
        yield from self.texts
        for function in self.lists[: len(self.texts) // 2]:
            yield f"user\n{question(function)}\nassistant\n{answer(function)}"


def write_data(folder: Path, seed: int = 0) -> Corpus:
    """Write the corpus of the standard library to a folder and return it."""
    corpus = collect([read_source(path) for path in stdlib_paths()], seed)
    save(corpus, folder, seed)
    return corpus


def save(corpus: Corpus, folder: Path, seed: int = 0) -> None:
    """Write the three files; some lists are repeated with `"fork": false`."""
    rng = np.random.default_rng([seed, 1])
    again = [function for function in corpus.lists if rng.random() < UNFORKED_COPIES]
    lines = [_chat(function) for function in (*corpus.lists, *corpus.sentences)]
    lines += [{**_chat(function), "fork": False} for function in again]
    lines += map(_window, corpus.texts)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / TRAIN_FILE, (lines[index] for index in rng.permutation(len(lines))))
    _write(folder / HELD_OUT_FILE, map(_chat, corpus.held_out))
    _write(folder / HELD_OUT_TEXT_FILE, map(_window, corpus.held_out_texts))


def collect(sources: Sequence[Source], seed: int = 0, lists: int = LISTS) -> Corpus:
    """Corpus of some modules, with `lists` functions that are answered with a list, most of them invented."""
    rng = np.random.default_rng([seed, 0])
    trained = _functions(source for source in sources if not source.held_out)
    held_out = {text: one for text, one in _functions(s for s in sources if s.held_out).items() if text not in trained}
    found = {text: one for text, one in trained.items() if len(one.parameters) >= FEWEST_ITEMS}
    pool = pool_of(list(trained.values()))
    while len(found) < lists:
        function = invent(pool, rng)
        if function.text not in held_out and len(function.text) <= LONGEST_SIGNATURE:
            found.setdefault(function.text, function)
    short = [one for one in trained.values() if len(one.parameters) < FEWEST_ITEMS]
    own = [window for source in sources if not source.held_out for window in windows(source.text)]
    foreign = [window for source in sources if source.held_out for window in windows(source.text)]
    return Corpus(
        tuple(found.values()),
        tuple(_shuffled(short, rng)[:SENTENCES]),
        tuple(_shuffled(own, rng)[:TEXTS]),
        tuple(_shuffled(list(held_out.values()), np.random.default_rng([seed, 2]))),
        tuple(_shuffled(foreign, np.random.default_rng([seed, 3]))),
    )


def windows(text: str) -> list[str]:
    """Split a text into windows of whole lines; windows that are too short, too long or not ASCII are dropped."""
    found = [""]
    for line in text.splitlines(keepends=True):
        if found[-1] and len(found[-1]) + len(line) > WINDOW:
            found.append("")
        found[-1] += line
    return [window for window in found if WINDOW // 2 <= len(window) <= WINDOW and window.isascii()]


def _functions(sources: Iterable[Source]) -> dict[str, Function]:
    """Usable functions by signature; an answer with a link or too many items would not fork."""
    found = {one.text: one for source in sources for one in functions_in(source.text)}
    return {
        text: one
        for text, one in found.items()
        if len(one.parameters) <= MOST_ITEMS
        and len(text) <= LONGEST_SIGNATURE
        and text.isascii()
        and "http" not in text.lower()
    }


def _shuffled(items: Sequence[Any], rng: np.random.Generator) -> list[Any]:
    return [items[index] for index in rng.permutation(len(items))]


def _chat(function: Function) -> dict[str, Any]:
    turns = (("user", question(function)), ("assistant", answer(function)))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _window(text: str) -> dict[str, Any]:
    """A window of a longer text, so no end-of-text token follows."""
    return {"text": text, "ends": False}


def _write(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    with file.open("w", encoding="utf-8", newline="\n") as opened:
        opened.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
