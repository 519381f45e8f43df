"""Manifest file: any change of its bytes is noticed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from spaceport.graphs.contract.manifest import MANIFEST_FILE, SCHEMA, ManifestError
from spaceport.graphs.contract.manifest_file import manifest_content, manifest_in
from support.small_bundle import fill

FLIPS = 600


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    fill(tmp_path)
    return (tmp_path / MANIFEST_FILE).read_bytes()


def test_a_manifest_is_read_as_it_was_written(content: bytes) -> None:
    manifest = manifest_in(content)
    assert manifest.schema == SCHEMA
    assert manifest_content(manifest) == content


def test_every_flipped_bit_is_noticed(content: bytes) -> None:
    """Without the digest, 73 of 600 flips changed a value, such as a token id, and the bundle opened."""
    choices = random.Random(0)
    for _ in range(FLIPS):
        flipped = bytearray(content)
        flipped[choices.randrange(len(flipped))] ^= 1 << choices.randrange(8)
        with pytest.raises(ValueError, match=r"\w"):
            manifest_in(bytes(flipped))


def test_changed_white_space_is_noticed(content: bytes) -> None:
    with pytest.raises(ManifestError, match=r"sha256 is .*…, the digest of its content is .*…: it was changed"):
        manifest_in(content.replace(b"\n", b"\r\n"))
    with pytest.raises(ManifestError, match="it was changed"):
        manifest_in(content + b" ")


@pytest.mark.parametrize("digest", ["null", "5", '""', '"\u00e9"', '"' + "0" * 63 + '"', "[]"])
def test_a_manifest_without_a_proper_digest_is_refused(content: bytes, digest: str) -> None:
    start = content.rindex(b'"sha256": ') + len(b'"sha256": ')
    with pytest.raises(ManifestError, match="expected the digest of the manifest"):
        manifest_in(content[:start] + digest.encode() + b"\n}\n")


def test_a_digest_of_other_content_is_refused(content: bytes) -> None:
    with pytest.raises(ManifestError, match="it was changed"):
        manifest_in(content.replace(b'"mit"', b'"gpl"'))


def test_an_entry_that_occurs_twice_is_refused(content: bytes) -> None:
    """JSON readers disagree on which of the two counts."""
    twice = content.replace(b'"opset": 23', b'"opset": 23, "opset": 24')
    with pytest.raises(ManifestError, match="has the entry 'opset' twice: expected each entry once"):
        manifest_in(twice)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused(content: bytes, number: str) -> None:
    with pytest.raises(ManifestError, match=f"contains {number}: expected JSON numbers"):
        manifest_in(content.replace(b'"temperature": 0.5', f'"temperature": {number}'.encode()))
