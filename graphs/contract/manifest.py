"""Manifest: what a bundle says of itself, as data; no files are touched here."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, BinaryIO, Literal, get_args

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.json_fields import JsonField, Rules, is_whole
from spaceport.graphs.contract.signature import ACTIVATIONS, WEIGHTS, Activations, Signature, Weights

SCHEMA = 3  # 1 had no engines and weights of one type only, 2 no quantized activations or embeddings
MANIFEST_FILE = "manifest.json"
ACCURACY_FILE = "accuracy.json"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
MODEL_FILE = "model.onnx"
DATA_FILE = f"{MODEL_FILE}.data"  # its weights
SELECTION_FILE = "selection.onnx"  # from logits to the best tokens, for engines that select tokens
ENGINES_FOLDER = "engines"

MAX_MASK_SLOTS = 64

Embeddings = Literal["same", "int8", "int4"]
EMBEDDINGS: tuple[Embeddings, ...] = get_args(Embeddings)


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
    def forbidden(self) -> tuple[int, ...]:
        """Tokens that no text may ever hold."""
        return (*dict.fromkeys(self.mask), *((self.child,) if self.child is not None else ()))

    @property
    def fork_ids(self) -> tuple[int, ...]:
        """The tokens with which a text goes on in another thread."""
        return () if self.fork is None else (self.fork,)


# Drafts with which a token's logits are those of plain decoding up to the noise of float sums: of any shape, or only one
# line of candidates in one thread at a time, whose logits are then those of plain decoding to the bit.
ExactDrafts = Literal["tree", "chain"]


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
    activations: Activations = "float"  # how the inputs of products with these weights are quantized
    embeddings: Embeddings = "same"  # how the input and output embeddings are stored
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
    def exact_drafts(self) -> ExactDrafts:
        """The drafts that change no text: 8-bit activations turn the noise of other slots into differences that count."""
        return "chain" if self.activations == "int8" else "tree"

    @property
    def _graph_files(self) -> tuple[FileRecord, ...]:
        return tuple(self.files[name] for name in sorted(self.files) if name.startswith(MODEL_FILE))

    @property
    def integer_matmuls(self) -> bool:
        """Whether its products have integers on both sides."""
        return self.weights == "int8" and self.activations != "float"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_json(self) -> str:
        """The content of the manifest's file."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n"


def manifest_of(data: object) -> Manifest:
    """The manifest that parsed JSON holds, every part of it checked; nothing may be missing and nothing more be there."""
    found = JsonField(data, "manifest", Rules(ManifestError), prefix="")
    schema = found.entry_or_null("schema").whole(1)
    if schema > SCHEMA:
        raise NewerSchema(
            f"schema is {schema}, this version reads up to {SCHEMA}: update spaceport, or export again with this version"
        )
    older = {1: {"weights": "same", "engines": {}}, 2: {}}
    if schema in older:
        entries = {**older[schema], "activations": "float", "embeddings": "same"}
        found = replace(found, value={**entries, **found.object()})
    told = found.entries(Manifest)
    manifest = Manifest(
        schema=schema,
        signature=_signature(told["signature"]),
        tokens=_tokens(told["tokens"]),
        max_mask_slots=told["max_mask_slots"].whole(0),
        max_positions=told["max_positions"].whole(1),
        family=told["family"].text(),
        parameters=told["parameters"].whole(0),
        opset=told["opset"].whole(1),
        attention=told["attention"].text(),
        special_tokens=told["special_tokens"].texts(),
        generation=told["generation"].object(),
        weights=told["weights"].one_of(WEIGHTS),
        activations=told["activations"].one_of(ACTIVATIONS),
        embeddings=told["embeddings"].one_of(EMBEDDINGS),
        files={name: _file(record) for name, record in told["files"].members().items()},
        engines={name: _engine(name, record) for name, record in told["engines"].members().items()},
        versions=told["versions"].texts(),
    )
    _hold_together(manifest)
    return manifest


def _hold_together(manifest: Manifest) -> None:
    """Raise where parts that are right by themselves do not fit each other: decoding would fail, or write nonsense."""
    tokens, slots, vocab = manifest.tokens, manifest.max_mask_slots, manifest.signature.vocab_size
    if slots > MAX_MASK_SLOTS:
        raise ManifestError(f"max_mask_slots is {slots}: expected at most {MAX_MASK_SLOTS}")
    if slots and len(tokens.mask) != 1 and len(tokens.mask) < slots:
        raise ManifestError(
            f"max_mask_slots is {slots}, tokens.mask has {len(tokens.mask)}: expected one for all, or one for each"
        )
    if manifest.weights == "same" and manifest.activations != "float":
        raise ManifestError(f"activations is {manifest.activations}, weights is same: expected float activations")
    if (tokens.fork is None) != (tokens.child is None):
        raise ManifestError(f"tokens.fork is {tokens.fork}, tokens.child is {tokens.child}: expected both or none")
    forking = () if tokens.fork is None or tokens.child is None else (tokens.fork, tokens.child)
    beyond = [token for token in (*tokens.mask, *forking, *tokens.end) if token >= vocab]
    if beyond:
        raise ManifestError(f"tokens hold the id {beyond[0]}: expected ids from 0 to {vocab - 1}")


def _signature(found: JsonField) -> Signature:
    found.entries(Signature)
    try:
        return Signature(**found.object())
    except ValueError as error:
        raise ManifestError(f"signature: {error}") from error


def _tokens(found: JsonField) -> TokenIds:
    told = found.entries(TokenIds)
    return TokenIds(
        mask=_ids(told["mask"]),
        fork=told["fork"].or_none(JsonField.whole),
        child=told["child"].or_none(JsonField.whole),
        end=_ids(told["end"]),
    )


def _ids(found: JsonField) -> tuple[int, ...]:
    if not all(is_whole(item.value, 0) for item in found.items("token ids")):
        found.refuse("a list of token ids")
    return found.wholes()


def _file(found: JsonField) -> FileRecord:
    told = found.entries(FileRecord)
    return FileRecord(_digest(told["sha256"]), told["size"].whole(0))


def _engine(name: str, found: JsonField) -> EngineRecord:
    told = found.entries(EngineRecord)
    if re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,99}\.engine", name) is None:
        raise ManifestError(
            f"engines name {name!r}: expected small letters, digits, dots and hyphens, ending in .engine"
        )
    return EngineRecord(
        sha256=_digest(told["sha256"]),
        size=told["size"].whole(0),
        graph=tuple(map(_digest, told["graph"].items("digests"))),
        flavour=told["flavour"].one_of(FLAVOURS),
        version=told["version"].text(),
        target=told["target"].text(),
        refittable=told["refittable"].boolean(),
        **{part: told[part].whole(1) for part in ("capacity", "requests", "step_rows", "prompt_rows")},
        decomposed=told["decomposed"].whole(0),
    )


def _digest(found: JsonField) -> str:
    value = found.value
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        found.refuse("64 hexadecimal digits")
    return value
