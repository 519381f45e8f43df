"""Manifest: the description of a bundle as data, and the bytes of its file."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, BinaryIO, Literal, get_args

from spaceport.graphs.contract.draft_methods import DraftMethod
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.formats import FORMATS, Format, Weights
from spaceport.graphs.contract.json_fields import JsonField, Rules, between, read, short
from spaceport.graphs.contract.signature import Signature

Flavour = Literal["tensorrt", "tensorrt-rtx"]

FLAVOURS: tuple[Flavour, ...] = get_args(Flavour)
LIBRARIES: dict[Flavour, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}  # Python modules


def _digest(entry: JsonField) -> str:
    value = entry.value
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        entry.refuse("64 hexadecimal digits")
    return value


Digest = Annotated[str, _digest]  # SHA-256 of a file
Size = Annotated[int, between(0, 2**50)]  # of a file in bytes
Count = Annotated[int, between(1, 2**31 - 1)]  # slots, requests or rows of an engine


@dataclass(frozen=True)
class FileRecord:
    """Digest and size of a file when the bundle was written."""

    sha256: Digest
    size: Size


@dataclass(frozen=True)
class EngineRecord:
    """A TensorRT engine of a bundle, and everything that it depends on."""

    sha256: Digest  # of the engine's file
    size: Size
    graph: tuple[Digest, ...]  # of model.onnx and of its data file at build time
    backend: Flavour
    version: str  # of the library that built it; no other version can run it
    target: str  # GPU architecture, such as sm89
    capacity: Count  # KV slots per request
    requests: Count  # maximum requests per call
    step_rows: Count  # maximum rows per request in the decode profile, for which CUDA graphs are captured
    prefill_rows: Count  # maximum rows per request in the prefill profile
    # layers whose attention runs as matmuls because the library has no fused kernel for it
    decomposed: Annotated[int, between(0, 2**31 - 1)] = 0

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


# Of the manifest's entries: a bundle of any other number is refused.
SCHEMA = 12
MANIFEST_FILE = "manifest.json"
ACCURACY_FILE = "accuracy.json"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
MODEL_FILE = "model.onnx"
DATA_FILE = f"{MODEL_FILE}.data"  # the weights of the graph
SELECTION_FILE = "selection.onnx"  # graph from logits to the best tokens, for engines that select tokens
ENGINES_FOLDER = "engines"

MAX_POSITIONS = 2**31 - 1
# What a manifest may say about the checkpoint's origin.
PROVENANCE = ("name", "source", "revision", "licence")


class ManifestError(InputFault):
    """An invalid manifest; the message states what is wrong."""


class OtherSchema(ManifestError):
    """A manifest with another schema, written by an earlier or later version of spaceport."""


@dataclass(frozen=True)
class TokenIds:
    """The special token ids of decoding."""

    mask: tuple[int, ...] = ()  # empty: no mask slots; one id: shared by all mask rows; else one id per mask row
    fork: int | None = None
    child: int | None = None
    end: tuple[int, ...] = ()

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Tokens that must never be generated."""
        return (*dict.fromkeys(self.mask), *((self.child,) if self.child is not None else ()))

    @property
    def with_two_roles(self) -> int | None:
        """A token that has two of the roles mask, fork, child and end, if there is one."""
        forking = (token for token in (self.fork, self.child) if token is not None)
        roles = [*dict.fromkeys(self.mask), *forking, *dict.fromkeys(self.end)]
        return min((token for token in roles if roles.count(token) > 1), default=None)

    @property
    def fork_ids(self) -> tuple[int, ...]:
        """The tokens that fork a thread: one or none."""
        return () if self.fork is None else (self.fork,)


@dataclass(frozen=True)
class Manifest:
    """The description of a bundle; a runtime reads it before any other file."""

    signature: Signature
    tokens: TokenIds
    max_positions: Annotated[int, between(1, MAX_POSITIONS)]
    model_type: str  # of the checkpoint's configuration
    parameters: Annotated[int, between(0, 10**15)]
    opset: Annotated[int, between(1, 1000)]
    attention: str  # "plain" (matmuls) or "operator" (ONNX Attention)
    special_tokens: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, ... as chat templates use them
    # the checkpoint's generation_config.json, not used by the runtime
    generation_config: dict[str, Any] = field(default_factory=dict)
    format: str = "float32"  # how numbers are stored and computed: a name in FORMATS
    drafts: DraftMethod = field(default_factory=DraftMethod)
    fork_by_default: bool = True  # whether requests may fork unless they say otherwise; False: forks change the output
    files: dict[str, FileRecord] = field(default_factory=dict)
    engines: dict[str, EngineRecord] = field(default_factory=dict)  # by file name in `engines/`
    versions: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)  # of the checkpoint, as far as known: see PROVENANCE
    schema: int = SCHEMA

    @property
    def graph(self) -> tuple[str, ...]:
        """SHA-256 digests of the files of the graph, from which engines are built."""
        return tuple(record.sha256 for record in self._graph_files)

    @property
    def graph_bytes(self) -> int:
        """The size of the graph and its weights."""
        return sum(record.size for record in self._graph_files)

    @property
    def _graph_files(self) -> tuple[FileRecord, ...]:
        return tuple(self.files[name] for name in sorted(self.files) if name.startswith(MODEL_FILE))

    @property
    def number_format(self) -> Format:
        """How numbers are stored and computed."""
        return FORMATS[self.format]

    @property
    def weights(self) -> Weights:
        """How the weights of linear layers are stored."""
        return self.number_format.weights

    @property
    def native(self) -> bool:
        """Whether the operators of `spaceport.kernels` compute its products."""
        return self.number_format.native

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def manifest_of(data: object) -> Manifest:
    """The manifest in parsed JSON; raises if any part is invalid, missing or unknown."""
    entry = JsonField(data, "manifest", Rules(ManifestError), prefix="")
    schema = entry.entry_or_null("schema").whole(1)
    if schema != SCHEMA:
        advice = "update spaceport, or export it again with this version" if schema > SCHEMA else "export it again"
        raise OtherSchema(f"schema is {schema}, this version reads {SCHEMA}: {advice}")
    manifest: Manifest = read(entry, Manifest)
    _check_consistency(manifest)
    return manifest


def _check_consistency(manifest: Manifest) -> None:
    """Raise if entries that are valid by themselves contradict each other."""
    tokens, drafts, vocab = manifest.tokens, manifest.drafts, manifest.signature.vocab_size
    if manifest.signature.lines != 1 + drafts.heads:
        raise ManifestError(
            f"signature.lines is {manifest.signature.lines}, drafts.max_tokens is {drafts.max_tokens} with the "
            f"predictor {drafts.predictor}: expected {1 + drafts.heads} lines of logits"
        )
    if drafts.mask_slots and len(tokens.mask) != 1 and len(tokens.mask) < drafts.mask_rows:
        raise ManifestError(
            f"drafts.max_tokens is {drafts.max_tokens}, tokens.mask has {len(tokens.mask)}: expected one for all, or "
            f"one for each of {drafts.mask_rows} mask rows"
        )
    _check_format(manifest.format, manifest.signature)
    if (tokens.fork is None) != (tokens.child is None):
        raise ManifestError(f"tokens.fork is {tokens.fork}, tokens.child is {tokens.child}: expected both or none")
    if tokens.with_two_roles is not None:
        raise ManifestError(
            f"token id {tokens.with_two_roles} has two of the roles mask, fork, child and end: expected different tokens"
        )
    every = (*tokens.mask, tokens.fork, tokens.child, *tokens.end)
    beyond = [token for token in every if token is not None and token >= vocab]
    if beyond:
        raise ManifestError(f"tokens hold the id {beyond[0]}: expected ids from 0 to {vocab - 1}")
    for name in manifest.engines:
        if re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,99}\.engine", name) is None:
            raise ManifestError(
                f"engines name {name!r}: expected small letters, digits, dots and hyphens, ending in .engine"
            )
    for name in manifest.provenance:
        if name not in PROVENANCE:
            raise ManifestError(f"provenance has the unknown {name!a}: expected {', '.join(PROVENANCE)}")


def _check_format(name: str, signature: Signature) -> None:
    """Raise unless a format is known, and the graph is of it."""
    if name not in FORMATS:
        raise ManifestError(f"format is {short(name)}: expected {', '.join(FORMATS)}")
    number_format = FORMATS[name]
    # Where native operators compute only products, keys and values are not rounded.
    for entry, expected in (("dtype", (number_format.dtype,)), ("kv_cache", ("same", number_format.kv_cache))):
        if (got := getattr(signature, entry)) not in expected:
            raise ManifestError(
                f"signature.{entry} is {got}, format is {name}: expected {' or '.join(dict.fromkeys(expected))}"
            )
    if signature.lowering not in number_format.lowerings:
        raise ManifestError(
            f"signature.lowering is {signature.lowering}, format is {name}: expected {' or '.join(number_format.lowerings)}"
        )


_DIGEST = "sha256"  # last entry: the digest of the file, computed with zeros instead of it
_ZEROS = b"0" * 64


def manifest_content(manifest: Manifest) -> bytes:
    """The content of a manifest's file with its digest."""
    return with_digest(manifest.as_dict())


def with_digest(entries: dict[str, Any]) -> bytes:
    """The content of a file with these entries and its digest."""
    unsigned = {**entries, _DIGEST: _ZEROS.decode()}
    content = (json.dumps(unsigned, indent=2) + "\n").encode()
    return _with_digest(content, _ZEROS, hashlib.sha256(content).hexdigest().encode())


def manifest_in(content: bytes) -> Manifest:
    """The manifest in a file's content; raises ValueError if any part is invalid, or not as it was written."""
    entries = json.loads(content.decode(), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    if isinstance(entries, dict) and entries.get("schema") == SCHEMA:
        _verify(content, entries.pop(_DIGEST, None))
    return manifest_of(entries)


def _verify(content: bytes, digest: object) -> None:
    """Raise unless this is the digest of the content."""
    if not isinstance(digest, str) or not digest.isascii() or len(digest) != len(_ZEROS):
        raise ManifestError(f"{_DIGEST} is {digest!r:.80}: expected the digest of the manifest, 64 hexadecimal digits")
    actual = hashlib.sha256(_with_digest(content, digest.encode(), _ZEROS)).hexdigest()
    if actual != digest:
        raise ManifestError(f"{_DIGEST} is {digest[:12]}…, the digest of its content is {actual[:12]}…: it was changed")


def _with_digest(content: bytes, old: bytes, new: bytes) -> bytes:
    """The content with another digest in its last entry."""
    before, _, after = content.rpartition(old)
    return before + new + after


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ManifestError(f"has the entry {ascii(name)[:80]} twice: expected each entry once")
        entries[name] = value
    return entries


def _refuse_constant(name: str) -> None:
    raise ManifestError(f"contains {name}: expected JSON numbers")
