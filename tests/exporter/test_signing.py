"""Signing: key pairs that only their owner can read, and signatures that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from spaceport.exporter.bundle_manifest import PRIVATE_FILE, PUBLIC_FILE, sign_manifest, write_key_pair
from spaceport.graphs.contract import atomic_file
from spaceport.graphs.contract.ed25519 import (
    SIGNATURE_FILE,
    SIGNER_FILE,
    new_private_key,
    read_private_key,
    read_public_key,
)
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE
from spaceport.runtime.bundle import open_bundle
from support.small_bundle import edit, new_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return new_bundle(tmp_path / "bundle")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_its_owner_can_read_a_new_private_key(tmp_path: Path, umask: int) -> None:
    previous = os.umask(umask)
    try:
        public = write_key_pair(tmp_path / "keys")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "keys" / PRIVATE_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert read_public_key(tmp_path / "keys" / PUBLIC_FILE).fingerprint == public.fingerprint
    assert read_private_key(tmp_path / "keys" / PRIVATE_FILE).public.fingerprint == public.fingerprint


@pytest.mark.parametrize("name", [PRIVATE_FILE, PUBLIC_FILE])
def test_existing_keys_are_never_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a key")
    with pytest.raises(InputFault, match=f"{name}: exists, and would be lost: choose another folder"):
        write_key_pair(tmp_path)
    assert (tmp_path / name).read_text() == "a key"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_dangling_link_is_not_followed_and_the_parent_folder_must_exist(tmp_path: Path) -> None:
    (tmp_path / PRIVATE_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputFault, match="exists"):
        write_key_pair(tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(InputFault, match="no such folder: create it first"):
        write_key_pair(tmp_path / "missing" / "keys")


def test_a_bundle_that_was_changed_meanwhile_is_not_signed(bundle: Path) -> None:
    content = open_bundle(bundle).manifest_content
    edit(bundle, lambda entries: entries.update(parameters=7))
    with pytest.raises(InputFault, match="was changed while it was signed: sign it again"):
        sign_manifest(bundle, content, new_private_key())
    assert not (bundle / SIGNATURE_FILE).exists()


def test_a_full_disk_leaves_the_old_signature(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, key = open_bundle(bundle).manifest_content, new_private_key()
    sign_manifest(bundle, content, key)
    before = {file.name: file.read_bytes() for file in bundle.iterdir()}
    assert key.public.verifies(before[MANIFEST_FILE], before[SIGNATURE_FILE])
    assert read_public_key(bundle / SIGNER_FILE).fingerprint == key.public.fingerprint
    finish = atomic_file._finish

    def full(stream: object, durable: bool) -> None:
        if SIGNATURE_FILE in str(getattr(stream, "name", "")):
            raise OSError(errno.ENOSPC, "No space left on device")
        finish(stream, durable)  # type: ignore[arg-type]

    monkeypatch.setattr(atomic_file, "_finish", full)
    with pytest.raises(OSError, match="No space left"):
        sign_manifest(bundle, content, new_private_key())
    assert {file.name: file.read_bytes() for file in bundle.iterdir()} == before
