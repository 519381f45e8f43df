"""Signed manifest: a required signature is verified before a bundle is parsed, and nothing else is accepted for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spaceport.exporter.bundle_manifest import sign_manifest
from spaceport.graphs.contract.ed25519 import (
    SIGNATURE_FILE,
    SIGNER_FILE,
    KeyFileError,
    PrivateKey,
    new_private_key,
)
from spaceport.graphs.contract.manifest import MANIFEST_FILE
from spaceport.runtime import Runtime
from spaceport.runtime import bundle as bundles
from spaceport.runtime.bundle import (
    BundleError,
    SignatureError,
    SignatureState,
    open_bundle,
    read_manifest,
    signature_state,
)
from spaceport.runtime.opened_files import OpenedFiles
from support.small_bundle import edit, new_bundle

KEY, OTHER = new_private_key(), new_private_key()


@pytest.fixture
def public(tmp_path: Path) -> Path:
    file = tmp_path / "public.pem"
    file.write_bytes(KEY.public.pem)
    return file


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = new_bundle(tmp_path / "bundle")
    sign(folder)
    return folder


def sign(folder: Path, key: PrivateKey = KEY) -> None:
    sign_manifest(folder, (folder / MANIFEST_FILE).read_bytes(), key)


def state_of(folder: Path) -> SignatureState:
    return signature_state(OpenedFiles(folder), (folder / MANIFEST_FILE).read_bytes())


def test_a_signed_bundle_opens_with_and_without_the_key(bundle: Path, public: Path) -> None:
    assert open_bundle(bundle, require_signature=public).manifest == open_bundle(bundle).manifest
    assert read_manifest(bundle, require_signature=str(public)) == read_manifest(bundle)
    assert state_of(bundle) == SignatureState(True, True, KEY.public.fingerprint)
    assert str(state_of(bundle)) == f"key {KEY.public.fingerprint}"


def test_an_unsigned_bundle_is_refused_if_a_signature_is_required(bundle: Path, public: Path) -> None:
    with pytest.raises(KeyFileError, match="No such file or directory"):
        open_bundle(bundle, require_signature=public.with_name("missing.pem"))
    (bundle / SIGNATURE_FILE).unlink()
    message = rf"{bundle}: has no signature .* with key sha256:\w{{64}} \({public}\) is required: get the signed bundle"
    with pytest.raises(SignatureError, match=message):
        open_bundle(bundle, require_signature=public)
    with pytest.raises(SignatureError):
        Runtime.open(bundle, require_signature=public)
    assert open_bundle(bundle).manifest.parameters
    assert str(state_of(bundle)) == "nobody (no signature)"


@pytest.mark.parametrize("content", [None, b"", b"not a key", OTHER.public.pem])
def test_the_required_key_alone_decides(bundle: Path, public: Path, content: bytes | None) -> None:
    (bundle / SIGNER_FILE).unlink()
    if content is not None:
        (bundle / SIGNER_FILE).write_bytes(content)
    assert open_bundle(bundle, require_signature=public).manifest.parameters
    assert state_of(bundle).valid is False
    assert str(state_of(bundle)).startswith("INVALID: ")


def test_a_signature_with_another_key_is_refused_whatever_key_the_bundle_has(bundle: Path, public: Path) -> None:
    sign(bundle, OTHER)
    message = rf"is signed with key {OTHER.public.fingerprint}, expected key {KEY.public.fingerprint}"
    with pytest.raises(SignatureError, match=message):
        open_bundle(bundle, require_signature=public)
    assert state_of(bundle).key == OTHER.public.fingerprint
    (bundle / SIGNER_FILE).write_bytes(KEY.public.pem)
    with pytest.raises(SignatureError, match="is not a signature of this manifest"):
        open_bundle(bundle, require_signature=public)
    assert state_of(bundle).valid is False


def test_a_changed_manifest_is_refused_and_shown_as_changed(bundle: Path, public: Path) -> None:
    edit(bundle, lambda entries: entries.update(parameters=7))
    with pytest.raises(SignatureError, match=r"is not a signature of this manifest .* was changed after it was signed"):
        open_bundle(bundle, require_signature=public)
    assert open_bundle(bundle).manifest.parameters == 7
    assert "changed after it was signed" in str(state_of(bundle))
    sign(bundle)
    assert open_bundle(bundle, require_signature=public).manifest.parameters == 7


def test_a_signature_that_is_no_file_of_its_size_is_refused(bundle: Path, public: Path) -> None:
    for content in (b"", b"x" * 64, b"x" * 1024):
        (bundle / SIGNATURE_FILE).write_bytes(content)
        with pytest.raises(SignatureError, match="is not a signature of this manifest"):
            open_bundle(bundle, require_signature=public)
        assert state_of(bundle).valid is False
    (bundle / SIGNATURE_FILE).write_bytes(b"x" * 2**20)
    with pytest.raises(BundleError, match="expected at most"):
        open_bundle(bundle, require_signature=public)
    (bundle / SIGNATURE_FILE).unlink()
    (bundle / SIGNATURE_FILE).mkdir()
    with pytest.raises(BundleError, match="not a regular file"):
        open_bundle(bundle, require_signature=public)
    assert state_of(bundle).valid is False


def test_nothing_is_parsed_before_the_signature_is_verified(
    bundle: Path, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(bundle, lambda entries: entries.update(parameters=7))
    parsed: list[bytes] = []
    monkeypatch.setattr(bundles, "manifest_in", parsed.append)
    for path in (bundle, str(bundle)):
        with pytest.raises(SignatureError):
            open_bundle(path, require_signature=public)
    assert parsed == []


def test_the_bytes_that_were_verified_are_those_that_are_parsed(
    bundle: Path, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is replaced as soon as it was read: neither verification nor parsing may read it again."""
    signed, read = (bundle / MANIFEST_FILE).read_bytes(), OpenedFiles.first_bytes

    def then_replaced(files: OpenedFiles, name: str, most: int) -> bytes:
        content = read(files, name, most)
        if name == MANIFEST_FILE:
            (bundle / MANIFEST_FILE).write_bytes(b"{}")
        return content

    monkeypatch.setattr(OpenedFiles, "first_bytes", then_replaced)
    opened = open_bundle(bundle, require_signature=public)
    assert opened.manifest_content == signed
    assert opened.manifest.parameters == json.loads(signed)["parameters"]
