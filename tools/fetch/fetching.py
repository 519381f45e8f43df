"""Fetching: make a folder a verified copy of the bundle at an address."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from spaceport.exporter.atomic_folder import check_target, publish, require_space
from spaceport.graphs.contract.ed25519 import MAX_KEY_BYTES, SIGNATURE_FILE, SIGNER_FILE, read_public_key
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import ACCURACY_FILE, ENGINES_FOLDER, MANIFEST_FILE, FileRecord, Manifest
from spaceport.runtime.bundle import LARGEST_MANIFEST, BundleError, check_name, read_manifest
from spaceport.tools.fetch.earlier_bundle import EarlierBundle, earlier_bundle
from spaceport.tools.fetch.partial_folder import keep_listed, locked_partial
from spaceport.tools.fetch.sources import FetchError, FetchSource, open_source
from spaceport.tools.fetch.transfer import is_complete, read_part, transfer

MOST_CONNECTIONS = 64
# Files that no manifest lists, each with its maximum size in bytes: who signed, and the result of `spaceport check`.
_SIGNATURE = {SIGNATURE_FILE: 2**10, SIGNER_FILE: MAX_KEY_BYTES}
_UNLISTED = {**_SIGNATURE, ACCURACY_FILE: LARGEST_MANIFEST}


@dataclass(frozen=True)
class FetchReport:
    """What was done to make a folder a copy of a bundle."""

    folder: str
    total_bytes: int  # size of all files that the manifest lists
    fetched_bytes: int  # read from the address
    unchanged: bool  # whether the folder was a copy before
    seconds: float

    @property
    def reused_bytes(self) -> int:
        """Size of what the folder's earlier bundle had, or an interrupted attempt had left."""
        return self.total_bytes - self.fetched_bytes

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {**asdict(self), "reused_bytes": self.reused_bytes}


def fetch(
    address: str,
    folder: Path,
    *,
    overwrite: bool = False,
    require_signature: Path | None = None,
    engines: bool = False,
    connections: int = 8,
    on_stage: Callable[[str], None] = lambda _: None,
) -> FetchReport:
    """Make a folder a verified copy of the bundle at an address.

    The manifest is read first, then the files that it lists. The folder is replaced in one step when all of them are
    verified. Files that its earlier bundle has are copied from there.

    - `address`: `https://…`, an object store such as `s3://…`, or a folder.
    - `overwrite`: Whether an existing bundle with other content is replaced; default False.
    - `require_signature`: Public key file: the manifest must have a signature of this key; default None.
    - `engines`: Whether engines are fetched too; default False.
    - `connections`: Number of parts that are read at a time; default 8.
    """
    started = perf_counter()
    if not 1 <= connections <= MOST_CONNECTIONS:
        raise OptionFault(f"connections is {connections}: expected 1 to {MOST_CONNECTIONS}")
    if require_signature is not None:
        read_public_key(require_signature)  # raises before anything is read
    source, target = open_source(address), folder.absolute()
    check_target(target, overwrite=True)

    def on_wait() -> None:
        on_stage("waiting for another process that fetches to this folder")

    with locked_partial(target, (MANIFEST_FILE, *_UNLISTED), on_wait) as partial:
        on_stage("reading the manifest")
        manifest = _begin(source, address.rstrip("/"), partial, require_signature)
        files = _files_of(manifest, engines)
        on_stage("verifying the files that are there")
        with earlier_bundle(target, files) as earlier:
            unchanged = len(earlier.verified) == len(files) and earlier.has_same(partial, (MANIFEST_FILE, *_SIGNATURE))
            fetched = 0
            if not unchanged:
                check_target(target, overwrite)
                fetched = _fill(source, partial, files, earlier, connections, on_stage)
                publish(partial, target)
    total = sum(record.size for record in files.values())
    return FetchReport(str(folder), total, fetched, unchanged, perf_counter() - started)


def _begin(source: FetchSource, address: str, partial: Path, key: Path | None) -> Manifest:
    """The manifest at an address, which is put into the partial folder with the files that no manifest lists.

    Its signature is verified before it is parsed.
    """
    bounds = {MANIFEST_FILE: LARGEST_MANIFEST, **_UNLISTED}
    small = {
        name: content for name, most in bounds.items() if (content := _small(source, address, name, most)) is not None
    }
    if MANIFEST_FILE not in small:
        raise FetchError(f"{address}: no {MANIFEST_FILE} there: expected the address of a bundle's folder")
    with tempfile.TemporaryDirectory(prefix="spaceport-fetch-") as checked:
        _write(Path(checked), small)
        try:
            manifest = read_manifest(Path(checked), require_signature=key)
        except BundleError as error:
            raise type(error)(str(error).replace(checked, address)) from error
    keep_listed(partial, manifest.files)
    _write(partial, small)
    return manifest


def _small(source: FetchSource, address: str, name: str, most: int) -> bytes | None:
    """The content of a small file; None if there is none."""
    try:
        content = read_part(source, name, 0, most + 1)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        if name != MANIFEST_FILE:  # object stores answer so for files that do not exist if they may not be listed
            return None
        raise FetchError(f"{address}/{name}: {error.strerror}: expected credentials that may read it") from error
    if len(content) > most:
        raise FetchError(f"{address}/{name}: more than {most} bytes: expected at most {most}")
    return content


def _write(folder: Path, small: Mapping[str, bytes]) -> None:
    for name, content in small.items():
        (folder / name).write_bytes(content)


def _files_of(manifest: Manifest, engines: bool) -> dict[str, FileRecord]:
    """The files to read, small ones first, so that most errors come early."""
    found = dict(manifest.files)
    if engines:
        found |= {f"{ENGINES_FOLDER}/{name}": record.file for name, record in manifest.engines.items()}
    for name in found:
        check_name(Path(MANIFEST_FILE), name)
        if name in (MANIFEST_FILE, *_UNLISTED):
            raise FetchError(f"the manifest lists {name}, which no manifest can list: export the checkpoint again")
    return dict(sorted(found.items(), key=lambda item: item[1].size))


def _fill(
    source: FetchSource,
    partial: Path,
    files: Mapping[str, FileRecord],
    earlier: EarlierBundle,
    connections: int,
    on_stage: Callable[[str], None],
) -> int:
    """Complete the partial folder; returns the number of bytes that were read from the source."""
    there = sum(file.stat().st_size for name in files if (file := partial / name).is_file())
    require_space(partial, sum(record.size for record in files.values()) - there)
    missing = {name: record for name, record in files.items() if not is_complete(partial / name, record)}
    missing = {name: record for name, record in missing.items() if not earlier.copied(name, partial)}
    return transfer(
        source, partial, missing, connections, lambda name: on_stage(f"fetching {name} ({files[name].size:,} bytes)")
    )
