"""Choose the format of a checkpoint's bundle, and write the bundle."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from transformers import PreTrainedModel

from spaceport import __version__
from spaceport.exporter.atomic_folder import check_target, refuse_while_written, require_space, write_manifest, writing
from spaceport.exporter.checkpoint import (
    Checkpoint,
    TokenFlags,
    load_model,
    model_config,
    model_without_values,
    open_checkpoint,
)
from spaceport.exporter.checkpoint_files import ModelFiles, provenance_of
from spaceport.exporter.gguf_file import GgufFile
from spaceport.exporter.native_graph import NativeGraph
from spaceport.exporter.native_weights import RoundedWeights, StoredWeights, packed_size
from spaceport.exporter.native_weights import Weights as NativeWeights
from spaceport.exporter.to_onnx import OPSETS, OnStage, check_written, to_onnx, write_selection
from spaceport.graphs.contract.faults import CheckpointError, InputFault, OptionFault
from spaceport.graphs.contract.formats import FORMATS, Format, Weights
from spaceport.graphs.contract.manifest import SELECTION_FILE, TEMPLATE_FILE, TOKENIZER_FILE, Manifest
from spaceport.graphs.contract.signature import DTYPES, Lowering, Precision, Signature
from spaceport.graphs.contract.tokenizer_bounds import UnsafeTokenizer, checked
from spaceport.graphs.decoder import AttentionImplementation, Decoder, decoder_of, freeze_rotary
from spaceport.graphs.find_parts import UnsupportedParts, parts_of, require_known_parts
from spaceport.graphs.heads import DraftHeads, heads_of
from spaceport.graphs.mechanism import InputRows, Phrases
from spaceport.graphs.parts import DecoderParts
from spaceport.graphs.quantization import BLOCKS, Quantization, quantizable_modules, quantize_model
from spaceport.graphs.traits import Traits, probe, refuse_by_config
from spaceport.kernels.gguf_weights import GGUF_BLOCKS

Machine = Literal["cpu", "gpu"]

# Weights of a model. Below the first, the steps of formats with fewer bits take as long as those of float32; from the
# second on, int4 is close enough: mean KL divergence 0.013 to 0.019 with 0.5 billion weights, 0.044 with 0.135 billion.
_SMALL, _LARGE = 20_000_000, 300_000_000
# Between these sizes an export measures the divergence of int4, in a fraction of a minute, and int8 replaces it above
# the largest: 0.02 nats are what weights of four bits cost usually in a model that is large enough for them.
MEASURED, LARGEST_DIVERGENCE = range(100_000_000, 600_000_000), 0.02
_LEAST_EXACT = 0.5  # of the weights of a GGUF file; the others are rounded to 8 bits

# Seconds on two CPU cores: of each export, of tracing a layer, and of a billion weights.
_SECONDS, _LAYER, _COPIED = 10, 3, 30

# Bytes of a weight in native formats, with the scales and minima of its block.
_NATIVE_BYTES: dict[Weights, float] = {"int8": 1.0625, "int4": 0.5625}
_TABLE_BYTES = 0.6875  # of embeddings beside int4


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export."""

    format: Format = FORMATS["float32"]
    requested_lowering: Lowering | None = None  # None: the format's default
    attention: AttentionImplementation | None = None  # None: see attention_implementation
    tokens: TokenFlags = field(default_factory=TokenFlags)
    remote_code: bool = False
    adapter: Path | None = None  # adapter folder, added to the checkpoint
    phrases: Phrases | None = None  # instead of those of checkpoint and adapter

    @property
    def lowering(self) -> Lowering:
        return self.requested_lowering or self.format.lowerings[0]

    @property
    def attention_implementation(self) -> AttentionImplementation:
        """By default the Attention operator for the append lowering, plain attention otherwise.

        ONNX Runtime computes the operator for a single row with another kernel than for several."""
        return self.attention or ("operator" if self.lowering == "append" else "plain")


class ChosenFormat(NamedTuple):
    """The format of a bundle."""

    format: Format
    reason: str  # why this one, in one line
    measurable: bool = False  # whether int4 is measured quickly, which decides better than the size of the model


def _exact_share(file: GgufFile) -> float:
    """The share of the weights in matrices that native operators compute with exactly as a GGUF file stores them."""
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 1]
    exact = sum(prod(tensor.shape) for tensor in matrices if tensor.kind in GGUF_BLOCKS)
    return exact / max(1, sum(prod(tensor.shape) for tensor in matrices))


def why_not_native(model: PreTrainedModel) -> str | None:
    """Why native operators cannot compute a model as a whole, which may be without values; None if they can."""
    try:
        require_known_parts(model, probe(model))
    except InputFault as reason:
        return str(reason)
    return None


def _named(name: str, files: ModelFiles) -> Format:
    if name not in FORMATS:
        raise OptionFault(f"format is {name!r}: expected {', '.join(FORMATS)}")
    if name != "stored":
        return FORMATS[name]
    other = "expected another format (--format int8)"
    if files.gguf is None:
        raise OptionFault(f"format is stored, which keeps the weights of a GGUF file: {files.path} is none; {other}")
    if not _exact_share(files.gguf):
        raise OptionFault(
            f"format is stored: {files.path} has no matrix in a type that native operators have ({', '.join(GGUF_BLOCKS)}); "
            f"{other}"
        )
    return FORMATS["stored"]


def _with_reason(name: str, reason: str) -> ChosenFormat:
    return ChosenFormat(FORMATS[name], f"format {name}: {reason}")


def _by_size(total: int) -> ChosenFormat:
    """The native format for a model with this number of weights, of which none is read."""
    size = f"{total / 1e6:,.1f} million weights"
    if total < _SMALL:
        return _with_reason(
            "float32", f"fewer bits gain nothing in a model of {size}; --format int8 uses them nevertheless"
        )
    if total < _LARGE:
        chosen = _with_reason("int8", f"a model of {size} loses too much in int4; --format float32 loses nothing")
    else:
        chosen = _with_reason("int4", f"{size}; --format int8 is closer to float32, and slower")
    return chosen._replace(measurable=total in MEASURED)


def choose_format(files: ModelFiles, wanted: str | None, machine: Machine, remote_code: bool = False) -> ChosenFormat:
    """The format of a checkpoint's bundle; the checkpoint's weights are not read."""
    if wanted is not None:
        named = _named(wanted, files)
        return ChosenFormat(named, f"format {named.name}: {named.purpose}")
    if machine == "gpu":
        return _with_reason("float16", "for a GPU; formats with smaller weights are for TensorRT (--format)")
    bare = model_without_values(model_config(files, remote_code), "float32")
    if (why := why_not_native(bare)) is not None:
        return _with_reason("float32", f"{why}; --format float16 is for GPUs")
    if files.gguf is not None and _exact_share(files.gguf) >= _LEAST_EXACT:
        return _with_reason(
            "stored", "the weights of the GGUF file as they are; --format int4 or int8 rounds them again"
        )
    return _by_size(sum(weight.numel() for weight in bare.parameters()))


@dataclass(frozen=True)
class ExportEstimate:
    """About what an export writes, and how long it takes."""

    bundle: int  # bytes
    temporary: int  # bytes of files without a name beside the bundle
    seconds: float

    def __str__(self) -> str:
        minutes = max(1, round(self.seconds / 60))
        return f"bundle of about {self.bundle / 1e6:,.1f} MB, in about {minutes} min on two CPU cores"


def estimate_export(checkpoint: Checkpoint, options: ExportOptions) -> ExportEstimate:
    """The estimate for a checkpoint, from the sizes in its configuration and its mechanisms; no weight is read."""
    model = model_without_values(checkpoint.config, options.format.dtype)
    weights, plain = options.format.weights, DTYPES[options.format.dtype].bytes
    packed = _NATIVE_BYTES if options.format.native else {"int8": 1, "float8": 1, "int4": 0.5 + plain / BLOCKS[0]}
    tables = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    sizes = {id(parameter): parameter.numel() for parameter in model.parameters()}
    quantized = set[int]()
    if options.format.native:
        quantized = {id(parameter) for parameter in model.parameters() if parameter.dim() > 1}
    elif weights != "same":
        quantized = {id(module.weight) for module in quantizable_modules(model, weights).values()}
    stored = sum(tensor.numel() for one in checkpoint.mechanisms if not one.refines for tensor in one.state().values())
    stored += sum(size for name, size in sizes.items() if name in quantized)
    floats = sum(size for name, size in sizes.items() if name not in quantized)
    gguf = checkpoint.source.files.gguf
    layers = checkpoint.config.get_text_config().num_hidden_layers
    traced = 0 if options.format.native else layers
    seconds = _SECONDS + _LAYER * traced + _COPIED * (stored + floats) / 1e9
    size = packed.get(weights, plain) * stored + plain * floats
    if options.format.native and weights == "int4":
        size += (_TABLE_BYTES - packed["int4"]) * sum(sizes[table] for table in tables)
    if weights == "stored" and gguf is not None:
        size = packed_size(gguf) + plain * floats
    temporary = stored if quantized and checkpoint.source.streams and not options.format.native else 0
    return ExportEstimate(int(size), temporary, seconds)


class Written(NamedTuple):
    """A graph that was written with its weights."""

    model: PreTrainedModel
    signature: Signature
    max_positions: int
    parameters: int


def quantization_error(quantization: Quantization) -> str:
    """The error of the quantized weights against the checkpoint's, in one line."""
    errors = quantization.errors
    worst = max(errors, key=errors.__getitem__)
    mean = sum(errors.values()) / len(errors)
    return f"relative RMS error of quantized weights: {mean:.2%} on average, at most {errors[worst]:.2%} ({worst})"


def check_lowering(options: ExportOptions) -> None:
    """Raise if graphs of the format cannot be written with the other options."""
    if options.lowering not in options.format.lowerings:
        raise OptionFault(
            f"lowering is {options.lowering}: expected {' or '.join(options.format.lowerings)} with format "
            f"{options.format.name} (--lowering)"
        )
    if options.format.native and options.attention == "operator":
        raise OptionFault(
            f"attention is operator: expected plain with format {options.format.name}, whose native operators compute "
            "attention (--attention)"
        )


def build_decoder(
    checkpoint: Checkpoint,
    options: ExportOptions,
    on_stage: OnStage = lambda name: None,
    arithmetic: Precision | None = None,
    scratch: Path | None = None,
) -> tuple[Decoder, Traits]:
    """The checkpoint's model as an exportable module.

    Its weights are rounded to the type of the format and quantized; it computes in `arithmetic`, by default in the same
    type. With a `scratch` folder for files without a name, the weights of one layer at a time are in memory."""
    on_stage("loading the weights")
    with torch.no_grad():
        model = load_model(checkpoint, options.format.dtype, scratch)
        weights: Weights = "same" if options.format.native else options.format.weights  # native: by round_weights
        if weights != "same":
            on_stage(f"quantizing weights to {weights}")
        quantization = quantize_model(model, weights)
        # Not converted if the type is the same: rotary frequencies stay in float32 whatever the type of the weights.
        if arithmetic not in (None, options.format.dtype):
            model.to(getattr(torch, arithmetic))
        on_stage("comparing the wrapped model with the unmodified model")
        return decoder_of(model, options.lowering, options.attention_implementation, quantization)


def manifest_for(checkpoint: Checkpoint, options: ExportOptions, written: Written) -> Manifest:
    """The manifest of a checkpoint's bundle, still without file records."""
    packages, files = ("torch", "transformers", "onnx", "onnxscript", "tokenizers"), checkpoint.source.files
    return Manifest(
        signature=written.signature,
        tokens=checkpoint.tokens,
        drafts=checkpoint.drafts,
        max_positions=written.max_positions,
        model_type=str(checkpoint.config.model_type),
        parameters=written.parameters,
        opset=OPSETS[options.lowering],
        attention=options.attention_implementation,
        format=options.format.name,
        fork_by_default=checkpoint.fork_by_default,
        special_tokens=checkpoint.special_tokens,
        generation_config=dict(checkpoint.source.generation),
        provenance=provenance_of(files.path, None if files.gguf is None else files.gguf.metadata),
        versions={
            "spaceport": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
    )


def _read_checkpoint(model: Path | ModelFiles, options: ExportOptions) -> Checkpoint:
    """Read the JSON files, the tokenizer and the mechanisms of a checkpoint, but no weights."""
    checkpoint = open_checkpoint(model, options.tokens, options.remote_code, options.adapter)
    if options.phrases is not None:
        checkpoint = checkpoint.with_mechanism(options.phrases)
    try:
        checked(checkpoint.tokenizer.encode())
    except UnsafeTokenizer as error:
        raise CheckpointError(
            f"{checkpoint.folder}: its tokenizer could make little text into very much: {error}: expected that of a published model"
        ) from error
    return checkpoint


@dataclass(frozen=True)
class _Export:
    """An export whose checkpoint was read; its methods write the graph with its weights into the unfinished bundle."""

    checkpoint: Checkpoint
    options: ExportOptions
    folder: Path
    on_stage: OnStage

    def write_traced(self) -> Written:
        """Read the weights; write the traced graph with its weights, and the graph that selects tokens on a GPU."""
        decoder, traits = build_decoder(self.checkpoint, self.options, self.on_stage, scratch=self.folder)
        parameters = sum(parameter.numel() for parameter in decoder.parameters())
        if quantized := decoder.quantization.quantized_weights:
            kinds = self.options.format.weights, self.options.format.dtype
            self.on_stage(f"{quantized:,} of {parameters:,} weights are {kinds[0]}, the others {kinds[1]}")
            self.on_stage(quantization_error(decoder.quantization))
        to_onnx(decoder, self.folder, self.on_stage)
        if self.options.lowering == "scatter":  # ONNX Runtime may run it on a GPU
            write_selection(self.folder / SELECTION_FILE, decoder.signature.vocab_size)
        return Written(decoder.model, decoder.signature, traits.max_positions, parameters)

    def write_native(self) -> Written:
        """Read the weights; write a graph of native operators with them, as far as the family has such operators."""
        weights = self.options.format.weights
        self.on_stage("loading the weights")
        with torch.no_grad():
            model = load_model(self.checkpoint, self.options.format.dtype, self.folder).eval()
            refuse_by_config(model)
            traits = probe(model)
            freeze_rotary(model)
            parameters = sum(parameter.numel() for parameter in model.parameters())
            self.on_stage("comparing the parts of the model with the unmodified model")
            try:
                parts = parts_of(model, traits)
            except UnsupportedParts as reason:
                if weights == "stored":
                    raise
                self.on_stage(f"{reason}; native operators compute its products only")
                decoder, traits = decoder_of(model, "scatter", "plain")
                to_onnx(decoder, self.folder, self.on_stage, weights)
                return Written(model, decoder.signature, traits.max_positions, parameters)
            graph = self._write_parts(parts, heads_of(model), traits)
        check_written(self.folder, graph.signature, type(model).__name__, self.on_stage)
        return Written(model, graph.signature, traits.max_positions, parameters - graph.merged)

    def _write_parts(self, parts: DecoderParts, heads: DraftHeads | None, traits: Traits) -> NativeGraph:
        form, rows = self.options.format, self.checkpoint.mechanism(InputRows)
        sizes = (traits.layers, traits.kv_heads, traits.head_dim, traits.vocab_size)
        lines = 1 if heads is None else 1 + heads.count
        signature = Signature(*sizes, form.dtype, "scatter", traits.window, lines, form.kv_cache)
        weights: NativeWeights = RoundedWeights(form.weights)
        gguf = self.checkpoint.source.files.gguf
        if form.weights == "stored" and gguf is not None:
            weights = StoredWeights(gguf, parts.heads, parts.kv_heads)
        self.on_stage(f"writing the graph and its weights as {form.name}")
        replaced = None if rows is None else (rows.tokens, rows.rows)
        graph = NativeGraph(self.folder, parts, signature, weights, replaced, heads)
        graph.write()
        for line in weights.notes:
            self.on_stage(line)
        return graph


def write_texts_and_drafts(checkpoint: Checkpoint, folder: Path, written: Written) -> None:
    """Write the tokenizer, the chat template, and the files with which the mechanisms draft beside the graph."""
    (folder / TOKENIZER_FILE).write_text(checkpoint.tokenizer, "utf-8")
    if checkpoint.template is not None:
        (folder / TEMPLATE_FILE).write_text(checkpoint.template, "utf-8")
    for mechanism in checkpoint.mechanisms:
        mechanism.write_files(folder, written.model, written.signature.vocab_size)


def export(
    model: Path | ModelFiles,
    target: Path,
    options: ExportOptions,
    overwrite: bool = False,
    on_stage: OnStage = lambda name: None,
) -> Manifest:
    """Write the bundle of a model to `target`; an old bundle stays until the new one is complete.

    `on_stage` gets the name of each stage when it begins, and what it measured."""
    check_lowering(options)
    check_target(target, overwrite)
    refuse_while_written(target)
    on_stage("reading the checkpoint")
    checkpoint = _read_checkpoint(model, options)
    estimate = estimate_export(checkpoint, options)
    on_stage(str(estimate))
    require_space(target.absolute().parent, estimate.bundle + estimate.temporary)
    refuse_while_written(target)  # another export may have been reading its checkpoint before
    with writing(target, overwrite, needed=estimate.bundle) as unfinished:
        started = _Export(checkpoint, options, unfinished, on_stage)
        written = started.write_native() if options.format.native else started.write_traced()
        write_texts_and_drafts(checkpoint, unfinished, written)
        on_stage("writing the manifest")
        return write_manifest(unfinished, manifest_for(checkpoint, options, written))
