"""Manifest: what a bundle says of itself, as data; no files are touched here."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, cast

from spaceport.graphs.faults import InputFault
from spaceport.graphs.signature import Signature

SCHEMA = 1
MANIFEST_FILE = "manifest.json"
ACCURACY_FILE = "accuracy.json"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
MODEL_FILE = "model.onnx"


class ManifestError(InputFault):
    """A manifest that says something which cannot be; the message says what."""


@dataclass(frozen=True)
class TokenIds:
    """The token ids that decoding goes by."""

    mask: tuple[int, ...] = ()  # none: a plain model; one: shared by all mask slots; else one for each mask slot
    fork: int | None = None
    child: int | None = None
    end: tuple[int, ...] = ()

    @property
    def unwritable(self) -> tuple[int, ...]:
        """Tokens that no text may ever hold."""
        return (*dict.fromkeys(self.mask), *((self.child,) if self.child is not None else ()))


@dataclass(frozen=True)
class FileRecord:
    """One file of a bundle as it was when the bundle was written."""

    sha256: str
    size: int


def record_of(stream: BinaryIO) -> FileRecord:
    """What is recorded of a file, read to its end."""
    hasher, size = hashlib.sha256(), 0
    while block := stream.read(2**20):
        hasher.update(block)
        size += len(block)
    return FileRecord(hasher.hexdigest(), size)


@dataclass(frozen=True)
class Manifest:
    """Everything that a runtime needs to know of a bundle before it opens any other file of it."""

    signature: Signature
    tokens: TokenIds
    max_mask_slots: int
    max_positions: int
    family: str  # model_type of the checkpoint's configuration
    parameters: int
    opset: int
    attention: str  # "plain" or "operator"
    special_tokens: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, ... as chat templates use them
    generation: dict[str, Any] = field(default_factory=dict)  # the checkpoint's generation_config, for the record
    files: dict[str, FileRecord] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def manifest_of(data: object) -> Manifest:
    """The manifest that parsed JSON holds, every part of it checked."""
    fields = _object(data, "manifest")
    schema = _number(fields, "schema", 1)
    if schema > SCHEMA:
        raise ManifestError(
            f"schema is {schema}, this version reads up to {SCHEMA}: update spaceport, or export again with this version"
        )
    return Manifest(
        schema=schema,
        signature=_signature(_object(fields.get("signature"), "signature")),
        tokens=_tokens(_object(fields.get("tokens"), "tokens")),
        max_mask_slots=_number(fields, "max_mask_slots", 0),
        max_positions=_number(fields, "max_positions", 1),
        family=_text(fields, "family"),
        parameters=_number(fields, "parameters", 0),
        opset=_number(fields, "opset", 1),
        attention=_text(fields, "attention"),
        special_tokens={
            key: str(value) for key, value in _object(fields.get("special_tokens", {}), "special_tokens").items()
        },
        generation=_object(fields.get("generation", {}), "generation"),
        files={name: _file(name, record) for name, record in _object(fields.get("files"), "files").items()},
        versions={key: str(value) for key, value in _object(fields.get("versions", {}), "versions").items()},
    )


def _signature(fields: dict[str, Any]) -> Signature:
    try:
        return Signature(**fields)
    except (TypeError, ValueError) as error:
        raise ManifestError(f"signature: {error}") from error


def _tokens(fields: dict[str, Any]) -> TokenIds:
    return TokenIds(
        mask=_ids(fields, "mask"),
        fork=None if fields.get("fork") is None else _number(fields, "fork", 0),
        child=None if fields.get("child") is None else _number(fields, "child", 0),
        end=_ids(fields, "end"),
    )


def _file(name: str, record: object) -> FileRecord:
    fields = _object(record, f"files[{name!r}]")
    digest = _text(fields, "sha256")
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ManifestError(f"sha256 of {name!r} is {digest!r}: expected 64 hexadecimal digits")
    return FileRecord(digest, _number(fields, "size", 0))


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ManifestError(f"{name} is {type(value).__name__}: expected an object")
    return cast(dict[str, Any], value)


def _number(fields: dict[str, Any], name: str, least: int) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ManifestError(f"{name} is {value!r}: expected a whole number of at least {least}")
    return value


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ManifestError(f"{name} is {value!r}: expected text")
    return value


def _ids(fields: dict[str, Any], name: str) -> tuple[int, ...]:
    value = fields.get(name, [])
    if not isinstance(value, list) or not all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    ):
        raise ManifestError(f"tokens.{name} is {value!r}: expected a list of token ids")
    return tuple(value)
