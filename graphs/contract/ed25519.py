"""Ed25519: keys in PEM files and the signatures of a bundle's manifest, with the package cryptography."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from spaceport.graphs.contract.faults import InputFault, MissingDependency
from spaceport.graphs.contract.installation import install_command
from spaceport.graphs.contract.manifest import MANIFEST_FILE

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE_FILE = f"{MANIFEST_FILE}.sig"  # 64 bytes: the signature of the manifest's file
SIGNER_FILE = f"{MANIFEST_FILE}.pub"  # public key of the signer in PEM format: says who signed, and proves nothing
MAX_KEY_BYTES = 2**16
_PAIRS = "`spaceport sign --new-key FOLDER` creates a key pair"

_PRIME = 2**255 - 19  # coordinates of points are below it
# The y coordinates of the eight points whose order divides 8, in three pairs of opposite ones: of order 1 and 2, of
# order 4, and of order 8. With such a key, one signature holds for one content in eight, or for every content.
_ORDER_8 = 0x5FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER = frozenset({1, _PRIME - 1, 0, _ORDER_8, _PRIME - _ORDER_8})


class KeyFileError(InputFault):
    """A key file cannot be read, or holds no usable Ed25519 key; the message says what to do."""


@dataclass(frozen=True)
class PublicKey:
    """A public key that verifies signatures."""

    pem: bytes
    fingerprint: str  # SHA-256 of the key's DER encoding, as sha256:HEX
    _key: Ed25519PublicKey = field(repr=False)

    def verifies(self, content: bytes, signature: bytes) -> bool:
        """Whether a signature was made over this content with the private key of this public key."""
        from cryptography.exceptions import InvalidSignature

        if not _is_usable_point(signature[:32]):
            return False
        try:
            self._key.verify(signature, content)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class PrivateKey:
    """A private key that signs, and its public key."""

    public: PublicKey
    _key: Ed25519PrivateKey = field(repr=False)

    @property
    def pem(self) -> bytes:
        """The key in PEM format (PKCS #8), not encrypted."""
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def sign(self, content: bytes) -> bytes:
        """The signature of this content."""
        return self._key.sign(content)


def read_public_key(file: str | os.PathLike[str]) -> PublicKey:
    """The public key in a PEM file."""
    return public_key_in(_content(Path(file)), Path(file))


def public_key_in(content: bytes, file: Path) -> PublicKey:
    """The public key in the content of a PEM file."""
    require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        got = "is a private key" if b"PRIVATE KEY-----" in content else "is not a public key in PEM format"
        raise KeyFileError(f"{file}: {got}: expected the public key of the signer; {_PAIRS}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise KeyFileError(f"{file}: is a key of another kind: expected an Ed25519 public key; {_PAIRS}")
    if not _is_usable_point(key.public_bytes_raw()):
        raise KeyFileError(
            f"{file}: is a point of small order or not encoded canonically, so that signatures of it prove nothing: expected "
            f"the public key of the signer; {_PAIRS}"
        )
    return _public(key)


def read_private_key(file: str | os.PathLike[str]) -> PrivateKey:
    """The private key in a PEM file that is not encrypted."""
    require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = _content(Path(file))
    try:
        key = load_pem_private_key(content, password=None)
    except TypeError as error:
        raise KeyFileError(f"{file}: is encrypted: expected a key without a passphrase") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        got = "is a public key" if b"PUBLIC KEY-----" in content else "is not a private key in PEM format"
        raise KeyFileError(f"{file}: {got}: expected the private key of the signer; {_PAIRS}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(f"{file}: is a key of another kind: expected an Ed25519 private key; {_PAIRS}")
    return PrivateKey(_public(key.public_key()), key)


def new_private_key() -> PrivateKey:
    """A new key from the random numbers of the operating system."""
    require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    return PrivateKey(_public(key.public_key()), key)


def require_cryptography() -> None:
    """Raise if the package cryptography is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            f"signatures need the package cryptography, which does not import ({error}): {install_command('sign')}"
        ) from error


def _is_usable_point(encoded: bytes) -> bool:
    """Whether an encoded point is canonical and of large order; the highest bit is the sign of x."""
    y = int.from_bytes(encoded, "little") & (2**255 - 1)
    return y < _PRIME and y not in _SMALL_ORDER


def _public(key: Ed25519PublicKey) -> PublicKey:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return PublicKey(pem, f"sha256:{hashlib.sha256(der).hexdigest()}", key)


def _content(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_KEY_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise KeyFileError(f"{file}: {reason}: expected a readable Ed25519 key in PEM format; {_PAIRS}") from error
    if len(content) > MAX_KEY_BYTES:
        raise KeyFileError(f"{file}: is longer than {MAX_KEY_BYTES} bytes: expected an Ed25519 key in PEM format")
    return content
