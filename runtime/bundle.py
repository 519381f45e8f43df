"""Bundle: an exported folder, with its files checked."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from spaceport.graphs.contract.draft_correction import CORRECTION_FILE, CorrectionTables, read_tables
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import (
    MANIFEST_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
    FileRecord,
    Manifest,
    NewerSchema,
    record_of,
)
from spaceport.graphs.contract.manifest_file import manifest_in

_LARGEST_MANIFEST = 16 * 2**20
_AGAIN = "copy the bundle again or export it again"


class BundleError(InputFault):
    """A folder is not a bundle, or its files changed after the export; the message says what to do."""


@dataclass(frozen=True)
class Bundle:
    """A bundle folder whose files match its manifest.

    - `path`: The folder.
    - `manifest`: What the bundle holds: graph, tokens, precision, sizes and hashes of its files.
    """

    path: Path
    manifest: Manifest


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """The bundle in a folder, once every file has the size and SHA-256 that its manifest records."""
    folder = Path(path)
    manifest = read_manifest(folder)
    for name in (MODEL_FILE, TOKENIZER_FILE):
        if name not in manifest.files:
            raise BundleError(f"{folder}: the manifest lists no {name}: expected one; export the checkpoint again")
    _refuse_foreign(folder)
    for name, record in manifest.files.items():
        _check(folder, name, record)
    return Bundle(folder, manifest)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle folder, without checking its files."""
    file = folder / MANIFEST_FILE
    if not folder.is_dir():
        got = "is a file" if folder.exists() else "no such folder"
        raise BundleError(f"{folder}: {got}: expected a bundle, the folder that `spaceport export` wrote")
    if not file.exists():
        hint = " (this is a checkpoint: export it first)" if (folder / "config.json").exists() else ""
        raise BundleError(f"{folder}: no {MANIFEST_FILE} in it: expected a bundle that `spaceport export` wrote{hint}")
    _check_regular(file)
    if file.stat().st_size > _LARGEST_MANIFEST:
        raise BundleError(f"{file}: {file.stat().st_size} bytes: expected at most {_LARGEST_MANIFEST}")
    try:
        return manifest_in(file.read_bytes())
    except NewerSchema as error:
        raise BundleError(f"{file}: {error}") from error
    except OSError as error:
        raise BundleError(f"{file}: {error.strerror}: expected a readable file") from error
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, too many digits, ManifestError
        raise BundleError(f"{file}: {error}; {_AGAIN}") from error


def read_correction(bundle: Bundle) -> CorrectionTables | None:
    """The draft correction of a bundle, or None if it has none."""
    if CORRECTION_FILE not in bundle.manifest.files:
        return None
    try:
        with (bundle.path / CORRECTION_FILE).open("rb") as file:
            return read_tables(file, bundle.manifest.signature.vocab_size)
    except (OSError, InputFault) as error:
        raise BundleError(f"{bundle.path}: {error}") from error


def _refuse_foreign(folder: Path) -> None:
    """Raise for links: a graph may name any file in the folder for its weights, so none may point outside."""
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):  # it was removed meanwhile, such as a replaced engine
            status = os.lstat(file)
            if not stat.S_ISDIR(status.st_mode):
                _check_status(file, status)


def _check(folder: Path, name: str, record: FileRecord) -> None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or not name.isprintable() or str(pure) != name:
        raise BundleError(f"{folder}: the manifest names {name!r}: expected a path inside the folder; {_AGAIN}")
    file = folder / name
    _check_regular(file)
    size = file.stat().st_size
    if size != record.size:
        raise BundleError(f"{file}: {size} bytes, the manifest says {record.size}: {_AGAIN}")
    try:
        with file.open("rb") as stream:
            found = record_of(stream)
    except OSError as error:
        raise BundleError(f"{file}: {error.strerror}: expected a readable file") from error
    if found != record:
        raise BundleError(f"{file}: sha256 is {found.sha256[:12]}…, the manifest says {record.sha256[:12]}…: {_AGAIN}")


def _check_regular(file: Path) -> None:
    try:
        status = os.lstat(file)
    except OSError as error:
        raise BundleError(f"{file}: {error.strerror}: {_AGAIN}") from error
    _check_status(file, status)


def _check_status(file: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{file}: not a regular file: copy the bundle with its links resolved (cp -rL)")
    if status.st_nlink != 1:
        raise BundleError(
            f"{file}: has {status.st_nlink} hard links, so it can be changed from outside the bundle: copy the bundle (cp -r)"
        )
