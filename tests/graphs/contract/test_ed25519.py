"""Ed25519: keys in PEM files, and errors that say which file is wrong and what is expected."""

from __future__ import annotations

import builtins
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from spaceport.graphs.contract.ed25519 import (
    MAX_KEY_BYTES,
    KeyFileError,
    PrivateKey,
    new_private_key,
    public_key_in,
    read_private_key,
    read_public_key,
)
from spaceport.graphs.contract.faults import MissingDependency

MESSAGE = b"a manifest"

PRIME, ORDER = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493  # of the field, and of the base point
Point = tuple[int, int]
IDENTITY: Point = (0, 1)


def added(first: Point, second: Point) -> Point:
    """The sum of two points by the definition of the curve (RFC 8032)."""
    (x, y), (u, v) = first, second
    product = -121665 * pow(121666, -1, PRIME) * x * y * u * v
    return (
        (x * v + y * u) * pow(1 + product, -1, PRIME) % PRIME,
        (y * v + x * u) * pow(1 - product, -1, PRIME) % PRIME,
    )


def multiples(point: Point) -> list[Point]:
    points = [point]
    while points[-1] != IDENTITY:
        points.append(added(points[-1], point))
    return points


def encoded(point: Point) -> bytes:
    x, y = point
    return (y | (x & 1) << 255).to_bytes(32, "little")


# of order 8
TORSION: Point = (
    43496726750457979451437558183816721346016168361625936758514574428539776020131,
    2707385501144840649318225287225658788936804267575313519463743609750303402022,
)
# Other encodings of the points whose y is 0, 1 or -1
NOT_CANONICAL = tuple(
    (y | sign << 255).to_bytes(32, "little")
    for y, sign in ((PRIME, 0), (PRIME, 1), (PRIME + 1, 0), (PRIME + 1, 1), (1, 1), (PRIME - 1, 1), (2**255 - 1, 0))
)


def pem_of(point: bytes) -> bytes:
    key = Ed25519PublicKey.from_public_bytes(point)
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture(scope="module")
def key() -> PrivateKey:
    return new_private_key()


def written(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


def test_a_signature_holds_for_its_content_and_its_key_alone(key: PrivateKey) -> None:
    signature = key.sign(MESSAGE)
    assert len(signature) == 64
    assert key.public.verifies(MESSAGE, signature)
    assert not key.public.verifies(MESSAGE + b"\n", signature)
    assert not new_private_key().public.verifies(MESSAGE, signature)
    for index in (0, 31, 32, 63):
        damaged = bytearray(signature)
        damaged[index] ^= 1
        assert not key.public.verifies(MESSAGE, bytes(damaged))
    for wrong in (b"", signature[:-1], signature + b"\n"):
        assert not key.public.verifies(MESSAGE, wrong)


def test_keys_are_read_from_the_files_that_were_written_and_never_shown(key: PrivateKey, tmp_path: Path) -> None:
    private = read_private_key(written(tmp_path / "private", key.pem))
    public = read_public_key(written(tmp_path / "public", key.public.pem))
    assert public.verifies(MESSAGE, private.sign(MESSAGE))
    der = load_pem_public_key(key.public.pem).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert private.public.fingerprint == public.fingerprint == f"sha256:{hashlib.sha256(der).hexdigest()}"
    assert key.pem.splitlines()[1].decode() not in repr(key)


def test_all_eight_keys_of_small_order_and_other_encodings_are_refused() -> None:
    points = [encoded(point) for point in multiples(TORSION)]
    assert len(set(points)) == 8
    forged = encoded(IDENTITY) + bytes(32)
    Ed25519PublicKey.from_public_bytes(encoded(IDENTITY)).verify(forged, MESSAGE)  # the package accepts it
    for point in (*points, *NOT_CANONICAL):
        with pytest.raises(KeyFileError, match=r"^key.pem: is a point of small order .*: expected the public key of"):
            public_key_in(pem_of(point), Path("key.pem"))


def test_signatures_whose_point_has_small_order_are_refused(key: PrivateKey) -> None:
    secret = load_pem_private_key(key.pem, None)
    assert isinstance(secret, Ed25519PrivateKey)
    scalar = int.from_bytes(hashlib.sha512(secret.private_bytes_raw()).digest()[:32], "little") & (2**254 - 8) | 2**254
    own = secret.public_key().public_bytes_raw()
    challenge = int.from_bytes(hashlib.sha512(encoded(IDENTITY) + own + MESSAGE).digest(), "little")
    signature = encoded(IDENTITY) + (challenge * scalar % ORDER).to_bytes(32, "little")
    secret.public_key().verify(signature, MESSAGE)
    assert not key.public.verifies(MESSAGE, signature)
    for point in (*map(encoded, multiples(TORSION)), *NOT_CANONICAL):
        assert not key.public.verifies(MESSAGE, point + signature[32:])


@pytest.fixture(scope="module")
def files(key: PrivateKey) -> dict[str, bytes]:
    """Contents of files, most of which are no usable keys."""
    other = rsa.generate_private_key(65537, 2048)
    secret = BestAvailableEncryption(b"secret")
    return {
        "private": key.pem,
        "public": key.public.pem,
        "empty": b"",
        "cut off": key.public.pem[:-40],
        "long": b"\x00" * (MAX_KEY_BYTES + 1),
        "public rsa": other.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        "private rsa": other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        "encrypted": load_pem_private_key(key.pem, None).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret),
    }


@pytest.mark.parametrize(
    ("read", "name", "message"),
    [
        (read_public_key, "private", "is a private key: expected the public key"),
        (read_public_key, "empty", "is not a public key in PEM format"),
        (read_public_key, "cut off", "is not a public key in PEM format"),
        (read_public_key, "long", f"is longer than {MAX_KEY_BYTES} bytes"),
        (read_public_key, "public rsa", "is a key of another kind: expected an Ed25519 public key"),
        (read_private_key, "public", "is a public key: expected the private key"),
        (read_private_key, "empty", "is not a private key in PEM format"),
        (read_private_key, "encrypted", "is encrypted: expected a key without a passphrase"),
        (read_private_key, "private rsa", "is a key of another kind: expected an Ed25519 private key"),
    ],
)
def test_a_file_without_a_usable_key_is_refused(
    read: Callable[[Path], object], name: str, message: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    file = written(tmp_path / "key.pem", files[name])
    with pytest.raises(KeyFileError, match=message) as caught:
        read(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("read", [read_public_key, read_private_key])
def test_a_file_that_cannot_be_read_is_refused(read: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"missing: No such file or directory: expected a readable .* --new-key"):
        read(tmp_path / "missing")
    with pytest.raises(KeyFileError, match="Is a directory"):
        read(tmp_path)
    with pytest.raises(KeyFileError, match="expected a readable"):
        read(Path("a\0b"))


def test_without_the_package_the_command_that_installs_it_is_named(
    key: PrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "cryptography":
            raise ModuleNotFoundError("hidden", name=name)
        return found(name, *arguments, **named)

    file = written(tmp_path / "public", key.public.pem)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency, match=r"signatures need the package cryptography.*pip install .*\[sign\]"):
        read_public_key(file)
