"""The manifest that completes a bundle's folder, its signature, and key pairs to sign with."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from spaceport.exporter.atomic_folder import locked
from spaceport.graphs.contract.atomic_file import flush, staged
from spaceport.graphs.contract.ed25519 import SIGNATURE_FILE, SIGNER_FILE, PrivateKey, PublicKey, new_private_key
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE, Manifest, manifest_content, record_of

PRIVATE_FILE, PUBLIC_FILE = "private.pem", "public.pem"


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest with the digests of all files of a folder, and flush everything to the disk.

    The manifest is written last: a folder without it does not open."""
    files = {}
    for file in sorted(folder.iterdir()):
        with file.open("rb") as stream:
            files[file.name] = record_of(stream)
        flush(file)
    complete = replace(manifest, files=files)
    path = folder / MANIFEST_FILE
    path.write_bytes(manifest_content(complete))
    flush(path)
    flush(folder)
    return complete


def write_key_pair(folder: Path) -> PublicKey:
    """Write a new key pair into a folder, which is created if it does not exist; only its owner may read the private key."""
    if not folder.absolute().parent.is_dir():
        raise InputFault(f"{folder.absolute().parent}: no such folder: create it first")
    key = new_private_key()
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in (PRIVATE_FILE, PUBLIC_FILE):
        if os.path.lexists(folder / name):
            raise InputFault(f"{folder / name}: exists, and would be lost: choose another folder for the new key pair")
    _create(folder / PRIVATE_FILE, key.pem, 0o600)
    try:
        _create(folder / PUBLIC_FILE, key.public.pem, 0o644)
    except BaseException:
        (folder / PRIVATE_FILE).unlink()
        raise
    return key.public


def sign_manifest(folder: Path, content: bytes, key: PrivateKey) -> None:
    """Put the signature of a bundle's manifest and the signer's public key into its folder.

    `content` is the manifest as it was when all files of the bundle were verified; raises if it was changed since.
    """
    with locked(folder) as descriptor:
        same = os.path.samestat(os.fstat(descriptor), folder.stat())
        if not same or (folder / MANIFEST_FILE).read_bytes() != content:
            raise InputFault(f"{folder}: was changed while it was signed: sign it again")
        with (
            staged(folder / SIGNER_FILE, key.public.pem, durable=True) as put_signer,
            staged(folder / SIGNATURE_FILE, key.sign(content), durable=True) as put_signature,
        ):
            put_signer()
            put_signature()


def _create(file: Path, content: bytes, mode: int) -> None:
    """Write a new file with these permissions from the start."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(descriptor)
