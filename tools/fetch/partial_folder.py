"""Partial folder: where a bundle is written beside its target, locked by one process, and left for the next attempt."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from spaceport.exporter.atomic_folder import locked
from spaceport.graphs.contract.manifest import MANIFEST_FILE, FileRecord, manifest_in
from spaceport.runtime.backends.private_files import problem_of
from spaceport.tools.fetch.sources import FetchError


@contextmanager
def locked_partial(target: Path, small: Collection[str], on_wait: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """The partial folder of a target, with what an interrupted attempt left there.

    Other processes that fetch to the same target wait. It is removed if the block ends well, or has left nothing but
    files with the names `small`.
    """
    partial = target.with_name(f".{target.name}.fetch")
    while True:
        partial.mkdir(mode=0o755, exist_ok=True)
        if (problem := problem_of(partial)) is not None and os.path.lexists(partial):
            raise FetchError(f"{problem}; remove it, or choose another folder")
        with ExitStack() as locks:
            try:
                descriptor = locks.enter_context(locked(partial, on_wait))
            except FileNotFoundError:  # another process has published it meanwhile
                continue
            if not _is_at(descriptor, partial):
                continue
            try:
                yield partial
            except BaseException:
                if all(path.name in small for path in partial.rglob("*")):
                    shutil.rmtree(partial, ignore_errors=True)
                raise
            if _is_at(descriptor, partial):  # else it is at the target now
                shutil.rmtree(partial, ignore_errors=True)
            return


def keep_listed(partial: Path, files: Mapping[str, FileRecord]) -> None:
    """Remove what an earlier attempt left of files that the manifest does not list, or lists with another content."""
    try:
        before: Mapping[str, FileRecord] = manifest_in((partial / MANIFEST_FILE).read_bytes()).files
    except (OSError, ValueError, RecursionError):
        before = {}
    kept = {partial / name for name, record in files.items() if before.get(name) == record}
    for path in sorted(partial.rglob("*"), reverse=True):  # the content of a folder before the folder
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in kept or path.is_symlink():
            path.unlink()


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a locked folder is still the one at the path, and not one that another process has published."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
