"""Packages: corpus of the Python sources of installed packages, for a larger code model."""

from __future__ import annotations

import sysconfig
import tokenize
from pathlib import Path

import numpy as np

from recipes.corpus import Corpus, save, windows
from recipes.sources import Source, read_source, stdlib_paths

_SKIPPED = ("test", "tests", "_vendor", "vendored", "__pycache__")
_LARGEST = 400_000  # bytes; larger files are usually generated
_WINDOW = 1_500  # characters per window, about 450 tokens
_HELD_OUT_TEXTS = 2_000


def write_code(folder: Path, seed: int = 0) -> Corpus:
    """Write the sources of the standard library and of all installed packages; whole packages are held out."""
    sources = [read_source(path) for path in stdlib_paths()] + installed()
    rng = np.random.default_rng([seed, 2])
    own = [window for source in sources if not source.held_out for window in windows(source.text, _WINDOW)]
    foreign = [window for source in sources if source.held_out for window in windows(source.text, _WINDOW)]
    texts = tuple(own[index] for index in rng.permutation(len(own)))
    held_out = tuple(foreign[index] for index in rng.permutation(len(foreign))[:_HELD_OUT_TEXTS])
    corpus = Corpus((), (), texts, (), held_out)
    save(corpus, folder, seed)
    return corpus


def installed() -> list[Source]:
    """Modules of the installed packages; either all modules of a package are held out or none."""
    found = []
    for root in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        for path in sorted(Path(root).rglob("*.py")):
            inside = path.relative_to(root)
            if path.stat().st_size <= _LARGEST and not set(inside.parts).intersection(_SKIPPED):
                text = _read(path)
                if text:
                    found.append(Source(inside.parts[0], text))
    return found


def _read(path: Path) -> str:
    try:
        with tokenize.open(path) as opened:
            return opened.read()
    except (SyntaxError, UnicodeDecodeError):  # for another Python version, or in an unknown encoding
        return ""
