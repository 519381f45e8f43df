"""Manifest: what a bundle says of itself, as data; no files are touched here."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any, BinaryIO, Literal, cast, get_args

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.signature import WEIGHTS, Signature, Weights

SCHEMA = 2  # 1 knew no engines, and weights of one type only
MANIFEST_FILE = "manifest.json"
ACCURACY_FILE = "accuracy.json"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
MODEL_FILE = "model.onnx"
DATA_FILE = f"{MODEL_FILE}.data"  # its weights
ENGINES_FOLDER = "engines"

MOST_MASK_SLOTS = 64


class ManifestError(InputFault):
    """A manifest that says something which cannot be; the message says what."""


class NewerSchema(ManifestError):
    """A manifest that a later version of spaceport wrote."""


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

    @property
    def forking(self) -> tuple[int, ...]:
        """The tokens with which a text goes on in another thread."""
        return () if self.fork is None else (self.fork,)


@dataclass(frozen=True)
class FileRecord:
    """One file of a bundle as it was when the bundle was written."""

    sha256: str
    size: int


Flavour = Literal["tensorrt", "tensorrt-rtx"]

FLAVOURS: tuple[Flavour, ...] = get_args(Flavour)
LIBRARIES: dict[Flavour, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}  # what is imported for each


@dataclass(frozen=True)
class EngineRecord:
    """An engine that was built from a bundle's graph, and all that it depends on beside that graph."""

    sha256: str  # of the engine's file
    size: int
    graph: tuple[str, ...]  # sha256 of model.onnx and of its data file, as they were when it was built
    flavour: Flavour
    version: str  # of the library that built it, and the only one that runs it
    target: str  # what it runs on, such as sm89
    capacity: int  # slots of a request
    requests: int  # most requests of a call
    step_rows: int  # most rows of a request in the profile of steps, which CUDA graphs are captured for
    prompt_rows: int  # most rows of a request in the profile of prompts
    refittable: bool = False
    decomposed: int = 0  # attention layers that run as matrix products, since the library has no kernel for them

    @property
    def file(self) -> FileRecord:
        """The engine's file as it was when it was built."""
        return FileRecord(self.sha256, self.size)


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
    weights: Weights = "same"  # how the weights of its matrix products are stored: as the signature's dtype, or smaller
    files: dict[str, FileRecord] = field(default_factory=dict)
    engines: dict[str, EngineRecord] = field(default_factory=dict)  # by their names below `engines/`
    versions: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA  # as it was read; what is written is always the newest

    @property
    def graph(self) -> tuple[str, ...]:
        """The digests of the files that hold the graph: what an engine is built from."""
        return tuple(record.sha256 for record in self._graph_files)

    @property
    def graph_bytes(self) -> int:
        """The size of the graph, nearly all of it weights."""
        return sum(record.size for record in self._graph_files)

    @property
    def _graph_files(self) -> tuple[FileRecord, ...]:
        return tuple(self.files[name] for name in sorted(self.files) if name.startswith(MODEL_FILE))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_json(self) -> str:
        """The content of the manifest's file."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n"


def manifest_of(data: object) -> Manifest:
    """The manifest that parsed JSON holds, every part of it checked; nothing may be missing and nothing more be there."""
    told = _object(data, "manifest")
    schema = _number(told, "schema", 1)
    if schema > SCHEMA:
        raise NewerSchema(
            f"schema is {schema}, this version reads up to {SCHEMA}: update spaceport, or export again with this version"
        )
    if schema == 1:
        told = {"weights": "same", "engines": {}, **told}
    _hold_to_fields(told, Manifest, "manifest")
    manifest = Manifest(
        schema=schema,
        signature=_signature(_object(told["signature"], "signature")),
        tokens=_tokens(_object(told["tokens"], "tokens")),
        max_mask_slots=_number(told, "max_mask_slots", 0),
        max_positions=_number(told, "max_positions", 1),
        family=_text(told, "family"),
        parameters=_number(told, "parameters", 0),
        opset=_number(told, "opset", 1),
        attention=_text(told, "attention"),
        special_tokens=_texts(told, "special_tokens"),
        generation=_object(told["generation"], "generation"),
        weights=_weights(told),
        files={name: _file(name, record) for name, record in _object(told["files"], "files").items()},
        engines={name: _engine(name, record) for name, record in _object(told["engines"], "engines").items()},
        versions=_texts(told, "versions"),
    )
    _hold_together(manifest)
    return manifest


def _hold_together(manifest: Manifest) -> None:
    """Raise where parts that are right by themselves do not fit each other: decoding would fail, or write nonsense."""
    tokens, slots, vocab = manifest.tokens, manifest.max_mask_slots, manifest.signature.vocab_size
    if slots > MOST_MASK_SLOTS:
        raise ManifestError(f"max_mask_slots is {slots}: expected at most {MOST_MASK_SLOTS}")
    if slots and len(tokens.mask) != 1 and len(tokens.mask) < slots:
        raise ManifestError(
            f"max_mask_slots is {slots}, tokens.mask has {len(tokens.mask)}: expected one for all, or one for each"
        )
    if (tokens.fork is None) != (tokens.child is None):
        raise ManifestError(f"tokens.fork is {tokens.fork}, tokens.child is {tokens.child}: expected both or none")
    forking = () if tokens.fork is None or tokens.child is None else (tokens.fork, tokens.child)
    beyond = [token for token in (*tokens.mask, *forking, *tokens.end) if token >= vocab]
    if beyond:
        raise ManifestError(f"tokens hold the id {beyond[0]}: expected ids from 0 to {vocab - 1}")


def _signature(told: dict[str, Any]) -> Signature:
    _hold_to_fields(told, Signature, "signature")
    try:
        return Signature(**told)
    except ValueError as error:
        raise ManifestError(f"signature: {error}") from error


def _tokens(told: dict[str, Any]) -> TokenIds:
    _hold_to_fields(told, TokenIds, "tokens")
    return TokenIds(
        mask=_ids(told, "mask"),
        fork=None if told["fork"] is None else _number(told, "fork", 0),
        child=None if told["child"] is None else _number(told, "child", 0),
        end=_ids(told, "end"),
    )


def _file(name: str, record: object) -> FileRecord:
    told = _object(record, f"files[{name!r}]")
    _hold_to_fields(told, FileRecord, f"files[{name!r}]")
    return FileRecord(_digest(_text(told, "sha256"), name), _number(told, "size", 0))


def _engine(name: str, record: object) -> EngineRecord:
    told = _object(record, f"engines[{name!r}]")
    _hold_to_fields(told, EngineRecord, f"engines[{name!r}]")
    if re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,99}\.engine", name) is None:
        raise ManifestError(
            f"engines name {name!r}: expected small letters, digits, dots and hyphens, ending in .engine"
        )
    if told["flavour"] not in FLAVOURS:
        raise ManifestError(f"flavour of {name} is {told['flavour']!r}: expected {' or '.join(FLAVOURS)}")
    if not isinstance(told["graph"], list) or not isinstance(told["refittable"], bool):
        raise ManifestError(f"engines[{name!r}]: expected a list of digests in graph, true or false in refittable")
    return EngineRecord(
        sha256=_digest(_text(told, "sha256"), name),
        size=_number(told, "size", 0),
        graph=tuple(_digest(digest, name) for digest in told["graph"]),
        flavour=cast(Flavour, told["flavour"]),
        version=_text(told, "version"),
        target=_text(told, "target"),
        refittable=told["refittable"],
        **{part: _number(told, part, 1) for part in ("capacity", "requests", "step_rows", "prompt_rows")},
        decomposed=_number(told, "decomposed", 0),
    )


def _weights(told: dict[str, Any]) -> Weights:
    if told["weights"] not in WEIGHTS:
        raise ManifestError(f"weights is {told['weights']!r}: expected {', '.join(WEIGHTS)}")
    return cast(Weights, told["weights"])


def _digest(value: object, name: str) -> str:
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ManifestError(f"sha256 of {name!r} is {value!r}: expected 64 hexadecimal digits")
    return value


def _hold_to_fields(told: dict[str, Any], kind: type, name: str) -> None:
    expected = {part.name for part in fields(kind)}
    for wrong, names in (("lacks", expected - set(told)), ("has the unknown", set(told) - expected)):
        if names:
            raise ManifestError(
                f"{name} {wrong} {', '.join(map(ascii, sorted(names)))}: expected {', '.join(sorted(expected))}"
            )


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ManifestError(f"{name} is {type(value).__name__}: expected an object")
    return cast(dict[str, Any], value)


def _number(told: dict[str, Any], name: str, least: int) -> int:
    value = told.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ManifestError(f"{name} is {value!r}: expected a whole number of at least {least}")
    return value


def _text(told: dict[str, Any], name: str) -> str:
    value = told[name]
    if not isinstance(value, str):
        raise ManifestError(f"{name} is {value!r}: expected text")
    return value


def _texts(told: dict[str, Any], name: str) -> dict[str, str]:
    values = _object(told[name], name)
    return {key: _text(values, key) for key in values}


def _ids(told: dict[str, Any], name: str) -> tuple[int, ...]:
    value = told[name]
    if not isinstance(value, list) or not all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    ):
        raise ManifestError(f"tokens.{name} is {value!r}: expected a list of token ids")
    return tuple(value)
