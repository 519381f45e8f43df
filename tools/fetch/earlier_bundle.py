"""Earlier bundle: the files of a folder that need not be fetched again."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from spaceport.graphs.contract.manifest import FileRecord
from spaceport.runtime.opened_files import BundleError, OpenedFiles


@dataclass(frozen=True)
class EarlierBundle:
    """A folder, and those of its files that have the recorded content."""

    files: OpenedFiles | None  # None: there is no folder
    verified: frozenset[str]

    def copied(self, name: str, folder: Path) -> bool:
        """Whether it has a file, which then has been copied to the folder."""
        if self.files is None or name not in self.verified:
            return False
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"/dev/fd/{self.files.descriptor(name)}").open("rb") as stream, copy.open("wb") as target:
            shutil.copyfileobj(stream, target, 2**20)
        return True

    def has_same(self, folder: Path, names: Iterable[str]) -> bool:
        """Whether these files are the same as in another folder, or in neither."""
        if self.files is None:
            return False
        return all(_content(self.files.path / name) == _content(folder / name) for name in names)


@contextmanager
def earlier_bundle(folder: Path, files: Mapping[str, FileRecord]) -> Iterator[EarlierBundle]:
    """What a folder has of these files, each verified; none if there is no folder."""
    if not folder.is_dir():
        yield EarlierBundle(None, frozenset())
        return
    opened = OpenedFiles(folder)
    try:
        verified = set()
        for name, record in files.items():
            with suppress(BundleError):
                opened.verify(name, record)
                verified.add(name)
        yield EarlierBundle(opened, frozenset(verified))
    finally:
        opened.close()


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
