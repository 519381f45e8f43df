"""Manifest: the description of a bundle as data; this module reads no files."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, BinaryIO, Literal, get_args

from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.json_fields import JsonField, Rules, is_whole
from spaceport.graphs.contract.signature import ACTIVATIONS, WEIGHTS, Activations, Signature, Weights

# 1: without engines and quantized weights; 2: without quantized activations and embeddings; 3: with the older names below
SCHEMA = 5
MANIFEST_FILE = "manifest.json"
ACCURACY_FILE = "accuracy.json"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
MODEL_FILE = "model.onnx"
DATA_FILE = f"{MODEL_FILE}.data"  # the weights of the graph
SELECTION_FILE = "selection.onnx"  # graph from logits to the best tokens, for engines that select tokens
ENGINES_FOLDER = "engines"

MAX_MASK_SLOTS = 64

Embeddings = Literal["same", "int8", "int4"]
EMBEDDINGS: tuple[Embeddings, ...] = get_args(Embeddings)


class ManifestError(InputFault):
    """An invalid manifest; the message states what is wrong."""


class NewerSchema(ManifestError):
    """A manifest with a newer schema, written by a later version of spaceport."""


@dataclass(frozen=True)
class TokenIds:
    """The special token ids of decoding."""

    mask: tuple[int, ...] = ()  # empty: no mask slots; one id: shared by all mask slots; else one id per mask slot
    fork: int | None = None
    child: int | None = None
    end: tuple[int, ...] = ()

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Tokens that must never be generated."""
        return (*dict.fromkeys(self.mask), *((self.child,) if self.child is not None else ()))

    @property
    def fork_ids(self) -> tuple[int, ...]:
        """The tokens that fork a thread: one or none."""
        return () if self.fork is None else (self.fork,)


# Draft shapes that do not change the output. "tree": any shape; logits equal those of plain decoding up to
# floating-point noise. "chain": only a single chain of candidates in one thread at a time; its logits are bit-identical
# to plain decoding.
ExactDrafts = Literal["tree", "chain"]


@dataclass(frozen=True)
class FileRecord:
    """Digest and size of a file when the bundle was written."""

    sha256: str
    size: int


Flavour = Literal["tensorrt", "tensorrt-rtx"]

FLAVOURS: tuple[Flavour, ...] = get_args(Flavour)
LIBRARIES: dict[Flavour, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}  # Python modules


@dataclass(frozen=True)
class EngineRecord:
    """A TensorRT engine of a bundle, and everything that it depends on."""

    sha256: str  # of the engine's file
    size: int
    graph: tuple[str, ...]  # sha256 of model.onnx and of its data file at build time
    backend: Flavour
    version: str  # of the library that built it; no other version can run it
    target: str  # GPU architecture, such as sm89
    capacity: int  # KV slots per request
    requests: int  # maximum requests per call
    step_rows: int  # maximum rows per request in the decode profile, for which CUDA graphs are captured
    prefill_rows: int  # maximum rows per request in the prefill profile
    refittable: bool = False
    decomposed: int = 0  # layers whose attention runs as matmuls because the library has no fused kernel for it

    @property
    def file(self) -> FileRecord:
        """Digest and size of the engine's file."""
        return FileRecord(self.sha256, self.size)


def record_of(stream: BinaryIO) -> FileRecord:
    """Digest and size of a file, which is read to its end."""
    hasher, size = hashlib.sha256(), 0
    while block := stream.read(2**20):
        hasher.update(block)
        size += len(block)
    return FileRecord(hasher.hexdigest(), size)


@dataclass(frozen=True)
class Manifest:
    """The description of a bundle; a runtime reads it before any other file."""

    signature: Signature
    tokens: TokenIds
    max_mask_slots: int
    max_positions: int
    model_type: str  # of the checkpoint's configuration
    parameters: int
    opset: int
    attention: str  # "plain" (matmuls) or "operator" (ONNX Attention)
    special_tokens: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, ... as chat templates use them
    generation_config: dict[str, Any] = field(
        default_factory=dict
    )  # the checkpoint's generation_config.json, not used by the runtime
    weights: Weights = "same"  # how linear layers' weights are stored; "same": in the signature's dtype
    activations: Activations = "float"  # how the inputs of layers with quantized weights are quantized
    embeddings: Embeddings = "same"  # how the input and output embeddings are stored
    fork_by_default: bool = True  # whether requests may fork unless they say otherwise; False: forks change the output
    files: dict[str, FileRecord] = field(default_factory=dict)
    engines: dict[str, EngineRecord] = field(default_factory=dict)  # by file name in `engines/`
    versions: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA  # of the file that was read; new manifests have the newest schema

    @property
    def graph(self) -> tuple[str, ...]:
        """SHA-256 digests of the files of the graph, from which engines are built."""
        return tuple(record.sha256 for record in self._graph_files)

    @property
    def graph_bytes(self) -> int:
        """The size of the graph and its weights."""
        return sum(record.size for record in self._graph_files)

    @property
    def exact_drafts(self) -> ExactDrafts:
        """Draft shapes that do not change the output; 8-bit activations amplify the noise of another slot order."""
        return "tree" if self.activations == "float" else "chain"

    @property
    def parallel_threads(self) -> bool:
        """Whether forked threads decode at the same time by default; one 8-bit limb amplifies noise too much for that."""
        return self.activations != "int8"

    @property
    def _graph_files(self) -> tuple[FileRecord, ...]:
        return tuple(self.files[name] for name in sorted(self.files) if name.startswith(MODEL_FILE))

    @property
    def integer_matmuls(self) -> bool:
        """Whether linear layers multiply int8 weights with int8 activations."""
        return self.weights == "int8" and self.activations != "float"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_json(self) -> str:
        """The content of the manifest's file."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n"


def manifest_of(data: object) -> Manifest:
    """The manifest in parsed JSON; raises if any part is invalid, missing or unknown."""
    found = JsonField(data, "manifest", Rules(ManifestError), prefix="")
    schema = found.entry_or_null("schema").whole(1)
    if schema > SCHEMA:
        raise NewerSchema(
            f"schema is {schema}, this version reads up to {SCHEMA}: update spaceport, or export again with this version"
        )
    if schema < SCHEMA:
        found = replace(found, value=_upgraded(found.object(), schema))
    entries = found.entries(Manifest)
    manifest = Manifest(
        schema=schema,
        signature=_signature(entries["signature"]),
        tokens=_tokens(entries["tokens"]),
        max_mask_slots=entries["max_mask_slots"].whole(0),
        max_positions=entries["max_positions"].whole(1),
        model_type=entries["model_type"].text(),
        parameters=entries["parameters"].whole(0),
        opset=entries["opset"].whole(1),
        attention=entries["attention"].text(),
        special_tokens=entries["special_tokens"].texts(),
        generation_config=entries["generation_config"].object(),
        weights=entries["weights"].one_of(WEIGHTS),
        activations=entries["activations"].one_of(ACTIVATIONS),
        embeddings=entries["embeddings"].one_of(EMBEDDINGS),
        fork_by_default=entries["fork_by_default"].boolean(),
        files={name: _file(record) for name, record in entries["files"].members().items()},
        engines={name: _engine(name, record) for name, record in entries["engines"].members().items()},
        versions=entries["versions"].texts(),
    )
    _check_consistency(manifest)
    return manifest


def _upgraded(data: dict[str, Any], schema: int) -> dict[str, Any]:
    """The entries of an older manifest under their present names, with defaults for those that it could not have."""
    defaults: dict[str, Any] = {"fork_by_default": True}
    if schema <= 2:
        defaults |= {"activations": "float", "embeddings": "same"}
    if schema == 1:
        defaults |= {"weights": "same", "engines": {}}
    upgraded: dict[str, Any] = {
        **defaults,
        **_renamed(data, {"family": "model_type", "generation": "generation_config"}),
    }
    engines = upgraded.get("engines")
    if isinstance(engines, dict):
        names = {"flavour": "backend", "prompt_rows": "prefill_rows"}
        upgraded["engines"] = {
            name: _renamed(engine, names) if isinstance(engine, dict) else engine for name, engine in engines.items()
        }
    return upgraded


def _renamed(entries: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The entries with some of them renamed; an entry stays if the new name is in use, and is then refused as unknown."""
    return {name if names.get(name, name) in entries else names[name]: value for name, value in entries.items()}


def _check_consistency(manifest: Manifest) -> None:
    """Raise if entries that are valid by themselves contradict each other."""
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
    entries = found.entries(TokenIds)
    return TokenIds(
        mask=_ids(entries["mask"]),
        fork=entries["fork"].or_none(JsonField.whole),
        child=entries["child"].or_none(JsonField.whole),
        end=_ids(entries["end"]),
    )


def _ids(found: JsonField) -> tuple[int, ...]:
    if not all(is_whole(item.value, 0) for item in found.items("token ids")):
        found.refuse("a list of token ids")
    return found.wholes()


def _file(found: JsonField) -> FileRecord:
    entries = found.entries(FileRecord)
    return FileRecord(_digest(entries["sha256"]), entries["size"].whole(0))


def _engine(name: str, found: JsonField) -> EngineRecord:
    entries = found.entries(EngineRecord)
    if re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,99}\.engine", name) is None:
        raise ManifestError(
            f"engines name {name!r}: expected small letters, digits, dots and hyphens, ending in .engine"
        )
    return EngineRecord(
        sha256=_digest(entries["sha256"]),
        size=entries["size"].whole(0),
        graph=tuple(map(_digest, entries["graph"].items("digests"))),
        backend=entries["backend"].one_of(FLAVOURS),
        version=entries["version"].text(),
        target=entries["target"].text(),
        refittable=entries["refittable"].boolean(),
        **{part: entries[part].whole(1) for part in ("capacity", "requests", "step_rows", "prefill_rows")},
        decomposed=entries["decomposed"].whole(0),
    )


def _digest(found: JsonField) -> str:
    value = found.value
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        found.refuse("64 hexadecimal digits")
    return value
