"""Signed manifest: whether a bundle's manifest, which has the digest of every file, has a valid signature."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spaceport.graphs.contract.ed25519 import (
    MAX_KEY_BYTES,
    SIGNATURE_FILE,
    SIGNER_FILE,
    KeyFileError,
    PublicKey,
    public_key_in,
    read_public_key,
)
from spaceport.graphs.contract.faults import MissingDependency
from spaceport.runtime.opened_files import BundleError, OpenedFiles

_LARGEST_SIGNATURE = 2**10  # bytes; an Ed25519 signature has 64


class SignatureError(BundleError):
    """A bundle lacks the signature that is required: it has none, one of another key or of another manifest."""


@dataclass(frozen=True)
class SignatureState:
    """What is known about a bundle's signature without a key that is trusted."""

    signed: bool
    valid: bool | None = None  # whether it is the signature of this manifest with `key`; None: unsigned or unknown
    key: str | None = None  # fingerprint of the public key that is stored beside the signature
    problem: str = ""  # why the signature is not valid, or cannot be verified

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if not self.signed:
            return "nobody (no signature)"
        if self.valid:
            return f"key {self.key}"
        return f"{'INVALID' if self.valid is False else 'unknown'}: {self.problem}"


def require_signature(files: OpenedFiles, content: bytes, key_file: str | os.PathLike[str]) -> None:
    """Raise unless the bundle has a signature over this content of its manifest, made with the key of this public key."""
    key = read_public_key(key_file)
    if not files.has(SIGNATURE_FILE):
        raise SignatureError(
            f"{files.path}: has no signature ({SIGNATURE_FILE}), a signature with key {key.fingerprint} ({key_file}) is "
            "required: get the signed bundle from its publisher, or sign it with `spaceport sign`"
        )
    signature = files.first_bytes(SIGNATURE_FILE, _LARGEST_SIGNATURE)
    if key.verifies(content, signature):
        return
    signer = _signer(files)
    if signer is not None and signer.verifies(content, signature):
        raise SignatureError(
            f"{files.path}: is signed with key {signer.fingerprint}, expected key {key.fingerprint} ({key_file}): get the "
            "bundle from the owner of the expected key, or require the signature of another key"
        )
    raise SignatureError(
        f"{files.path / SIGNATURE_FILE}: is not a signature of this manifest with key {key.fingerprint} ({key_file}): the "
        "bundle was changed after it was signed, or the signature is of another bundle: get the bundle again, or sign it "
        "with `spaceport sign`"
    )


def signature_state(files: OpenedFiles, content: bytes) -> SignatureState:
    """Who signed a bundle, according to the public key beside its signature, which anybody could have put there."""
    if not files.has(SIGNATURE_FILE):
        return SignatureState(False)
    try:
        signature = files.first_bytes(SIGNATURE_FILE, _LARGEST_SIGNATURE)
        key = public_key_in(files.first_bytes(SIGNER_FILE, MAX_KEY_BYTES), files.path / SIGNER_FILE)
    except MissingDependency as error:
        return SignatureState(True, problem=str(error))
    except (BundleError, KeyFileError) as error:
        return SignatureState(True, False, problem=str(error))
    if key.verifies(content, signature):
        return SignatureState(True, True, key.fingerprint)
    changed = f"not a signature of this manifest with key {key.fingerprint}; the bundle was changed after it was signed"
    return SignatureState(True, False, key.fingerprint, changed)


def _signer(files: OpenedFiles) -> PublicKey | None:
    """The public key beside the signature, if there is a readable one."""
    try:
        return public_key_in(files.first_bytes(SIGNER_FILE, MAX_KEY_BYTES), Path(SIGNER_FILE))
    except (BundleError, KeyFileError):
        return None
