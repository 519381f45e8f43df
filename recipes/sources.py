"""Sources: modules of the running Python's standard library, split into training and held-out files."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import tokenize
from dataclasses import dataclass
from pathlib import Path

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
