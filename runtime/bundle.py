"""An exported folder, with its files checked."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeVar

from spaceport.graphs.contract.draft_methods import CORRECTION_FILE, CorrectionTables, read_tables
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import (
    DATA_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
    Manifest,
    OtherSchema,
    manifest_in,
)
from spaceport.graphs.contract.phrases import PHRASES_FILE, PhraseTable, read_phrases
from spaceport.runtime.memory import copying_pays
from spaceport.runtime.opened_files import AGAIN, OpenedFiles
from spaceport.runtime.opened_files import BundleError as BundleError
from spaceport.runtime.opened_files import ChangedWhileOpening as ChangedWhileOpening

T = TypeVar("T")
_LARGEST_MANIFEST = 16 * 2**20  # bytes


@dataclass(frozen=True)
class Bundle:
    """A bundle folder whose files match its manifest.

    - `path`: The folder.
    - `manifest`: What the bundle holds: graph, tokens, precision, sizes and hashes of its files.
    - `files`: The verified files, held open; None: files are read by their names without verification.
    - `copies_weights`: Whether engines copy the weights into memory of their own, so that later changes have no effect.
    - `manifest_content`: The content of the manifest's file, by whose hash a bundle is told from others; empty if no file
      was read.
    """

    path: Path
    manifest: Manifest
    files: OpenedFiles | None = None
    copies_weights: bool = False
    manifest_content: bytes = field(default=b"", repr=False)

    def read(self, name: str) -> bytes:
        """The content of a file that the manifest lists, exactly as it was verified."""
        return (self.path / name).read_bytes() if self.files is None else self.files.read(name)

    @property
    def maybe_changed(self) -> bool:
        """Whether `require_unchanged` raises, or reads whole files first."""
        return not all(files.has_stamp(name) for files, name in self._mapped_weights())

    def require_unchanged(self) -> None:
        """Raise if weights that engines may still read from their files were changed since the bundle was opened."""
        for files, name in self._mapped_weights():
            files.require_unchanged(name)

    def _mapped_weights(self) -> list[tuple[OpenedFiles, str]]:
        if self.files is None or self.copies_weights:
            return []
        return [(self.files, name) for name in _weight_files(self.manifest)]


def open_bundle(
    path: str | os.PathLike[str],
    *,
    allow_links: bool = False,
    copy_weights: bool | None = None,
) -> Bundle:
    """The bundle in a folder, once every file has the size and SHA-256 that its manifest records.

    - `allow_links`: Whether its files may be symbolic links or have several hard links, as in caches of a model hub and
      in stores without duplicates; default False.
    - `copy_weights`: Whether engines copy the weights into memory of their own instead of mapping their file, so that a
      later change or truncation of the file has no effect; default None: if that makes steps faster, which read all
      weights of native operators: from 32 MB on, on a system with huge pages.
    """
    files, content, manifest = _with_manifest(Path(path), allow_links)
    try:
        _verify(files, manifest)
    except BaseException:
        files.close()
        raise
    names = _weight_files(manifest)
    linked = any(Path(files.location, name).is_symlink() for name in names)
    weights = sum(manifest.files[name].size for name in names)
    copies = manifest.native and copying_pays(weights) if copy_weights is None else copy_weights
    return Bundle(Path(path), manifest, files, copies or linked, content)


def read_manifest(folder: Path, allow_links: bool = False) -> Manifest:
    """The manifest of a bundle folder, without checking its files."""
    files, _, manifest = _with_manifest(folder, allow_links)
    files.close()
    return manifest


def _weight_files(manifest: Manifest) -> list[str]:
    return [name for name in manifest.files if name.startswith(DATA_FILE)]


def read_correction(bundle: Bundle) -> CorrectionTables | None:
    """The draft correction of a bundle, or None if it has none."""
    return _of_vocabulary(bundle, CORRECTION_FILE, read_tables)


def read_phrase_table(bundle: Bundle) -> PhraseTable | None:
    """The phrases of a bundle, or None if it has none."""
    return _of_vocabulary(bundle, PHRASES_FILE, read_phrases)


def _of_vocabulary(bundle: Bundle, name: str, read: Callable[[BinaryIO, int], T]) -> T | None:
    """What a function reads from a file of a bundle, given the size of the vocabulary; None without the file."""
    if name not in bundle.manifest.files:
        return None
    try:
        return read(io.BytesIO(bundle.read(name)), bundle.manifest.signature.vocab_size)
    except (OSError, InputFault) as error:
        raise BundleError(f"{bundle.path}: {error}") from error


def _open_folder(folder: Path, links: bool) -> OpenedFiles:
    if not folder.is_dir():
        got = "is a file" if folder.exists() else "no such folder"
        raise BundleError(f"{folder}: {got}: expected a bundle, the folder that `spaceport export` wrote")
    try:
        return OpenedFiles(folder, links)
    except OSError as error:
        raise BundleError(f"{folder}: {error.strerror}: expected a readable folder") from error


def _with_manifest(folder: Path, links: bool) -> tuple[OpenedFiles, bytes, Manifest]:
    """An open folder and its manifest; opened again if an export replaces the folder meanwhile."""
    while True:
        files = _open_folder(folder, links)
        try:
            return files, *_manifest(files)
        except BaseException as error:
            replaced = files.replaced
            files.close()
            if not isinstance(error, BundleError) or not replaced:
                raise


def _manifest(files: OpenedFiles) -> tuple[bytes, Manifest]:
    """The manifest of a folder, as content and data."""
    folder, file = files.path, files.path / MANIFEST_FILE
    if not os.path.lexists(file):
        hint = " (this is a checkpoint: export it first)" if (folder / "config.json").exists() else ""
        raise BundleError(f"{folder}: no {MANIFEST_FILE} in it: expected a bundle that `spaceport export` wrote{hint}")
    content = files.first_bytes(MANIFEST_FILE, _LARGEST_MANIFEST)
    try:
        return content, manifest_in(content)
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, too many digits, ManifestError
        advice = "" if isinstance(error, OtherSchema) else f"; {AGAIN}"
        raise BundleError(f"{file}: {error}{advice}") from error


def _verify(files: OpenedFiles, manifest: Manifest) -> None:
    """Verify all files that the manifest lists."""
    folder = files.path
    for name in (MODEL_FILE, TOKENIZER_FILE):
        if name not in manifest.files:
            raise BundleError(f"{folder}: the manifest lists no {name}: expected one; export the checkpoint again")
    if not files.links:
        _refuse_foreign(files)
    for name, record in manifest.files.items():
        _check_name(folder, name)
        files.verify(name, record)


def _refuse_foreign(files: OpenedFiles) -> None:
    """Raise for links anywhere in the folder: other programs that read it may follow them out of the bundle."""
    for file in files.path.rglob("*"):
        with suppress(FileNotFoundError):  # it was removed meanwhile, such as a replaced engine
            status = os.lstat(file)
            if not stat.S_ISDIR(status.st_mode):
                files.check_status(file, status)


def _check_name(folder: Path, name: str) -> None:
    """Raise unless the name of a file in a manifest is a path inside the bundle's folder."""
    pure = PurePosixPath(name)
    if (
        not pure.parts
        or pure.is_absolute()
        or ".." in pure.parts
        or "\\" in name
        or not name.isprintable()
        or str(pure) != name
    ):
        raise BundleError(f"{folder}: the manifest names {name!r}: expected a path inside the folder; {AGAIN}")
