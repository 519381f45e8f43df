"""Export: a checkpoint folder becomes a bundle folder."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import torch

from spaceport import __version__
from spaceport.exporter.atomic_folder import check_target, require_space, writing
from spaceport.exporter.bundle_files import seal
from spaceport.exporter.checkpoint import Checkpoint, load_model, open_checkpoint
from spaceport.exporter.checkpoint import TokenFlags as TokenFlags
from spaceport.exporter.prompt_tokens import Prompt, prompt_tokens
from spaceport.exporter.quantization_scales import write_scales
from spaceport.exporter.selection_graph import write_selection
from spaceport.exporter.to_onnx import DEFAULT_OPSET, check_opset, to_onnx
from spaceport.graphs.contract.dtypes import DTYPES
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import SELECTION_FILE, TEMPLATE_FILE, TOKENIZER_FILE, Manifest
from spaceport.graphs.contract.signature import Activations, Lowering, Precision, Weights
from spaceport.graphs.decoder import AttentionImplementation, Decoder, decoder_of
from spaceport.graphs.quantize import ModelScales, quantize_model
from spaceport.graphs.traits import Traits

# Hears the name of each stage as it begins.
Stage = Callable[[str], None]


# How activations can be quantized with these weights and this lowering, the default first; float where nothing is said.
_ACTIVATIONS: dict[tuple[Weights, Lowering], tuple[Activations, ...]] = {
    ("int4", "scatter"): ("int8", "float"),
    ("int8", "scatter"): ("int8x2", "int8", "float"),
    ("int8", "append"): ("int8x2", "int8", "float"),
}


@dataclass(frozen=True)
class ExportOptions:
    """How a checkpoint is exported."""

    lowering: Lowering = "scatter"
    dtype: Precision = "float32"
    weights: Weights = "same"  # of linear layers: as all others, or rounded to few bits
    attention: AttentionImplementation | None = (
        None  # nothing: plain matrix products for scatter, the operator for append
    )
    requested_opset: int | None = None  # nothing: the lowest that the lowering can be said in
    tokens: TokenFlags = field(default_factory=TokenFlags)
    remote_code: bool = False
    requested_activations: Activations | None = None  # nothing: what suits the weights and the lowering
    calibrate: tuple[Prompt, ...] = ()  # prompts behind which the model writes texts; none: behind single tokens

    @property
    def activations(self) -> Activations:
        return self.requested_activations or self.activation_choices[0]

    @property
    def activation_choices(self) -> tuple[Activations, ...]:
        """How activations can be quantized with these weights and this lowering, the default first."""
        if self.weights == "int4" and (self.dtype, self.form) != ("float32", "plain"):
            return ("float",)  # int8 is for the CPU, and its drafts are exact with matrix products only
        return _ACTIVATIONS.get((self.weights, self.lowering), ("float",))

    @property
    def opset(self) -> int:
        return DEFAULT_OPSET[self.lowering] if self.requested_opset is None else self.requested_opset

    @property
    def form(self) -> AttentionImplementation:
        return self.attention or ("plain" if self.lowering == "scatter" else "operator")


def export(
    folder: Path, target: Path, options: ExportOptions, overwrite: bool = False, stage: Stage = lambda name: None
) -> Manifest:
    """Write the bundle of the checkpoint in `folder` to `target`; an old bundle there stays until the new one is whole."""
    check_opset(options.opset, options.lowering)
    check_activations(options)
    check_target(target, overwrite)
    stage("reading the checkpoint")
    checkpoint = open_checkpoint(folder, options.tokens, options.remote_code)
    options = with_supported_activations(checkpoint, options)
    decoder, traits = build_decoder(checkpoint, options, stage)
    with writing(target, overwrite) as partial:
        parameters = (
            sum(parameter.numel() for parameter in decoder.parameters()) - decoder.quantization.extra_embedding_weights
        )
        rounded = decoder.quantization.quantized_weights  # in at most a byte each
        require_space(partial.parent, (parameters - rounded) * DTYPES[options.dtype].bytes + rounded)
        if rounded:
            stage(f"{rounded:,} of {parameters:,} weights are {options.weights}, the others {options.dtype}")
        stage("tracing and writing the graph")
        to_onnx(decoder, partial, options.opset)
        if decoder.quantization.integers is not None:
            write_scales(partial, decoder.quantization.integers)
        elif options.lowering == "scatter":  # what a GPU may run by onnxruntime
            write_selection(partial / SELECTION_FILE, decoder.signature.vocab_size)
        (partial / TOKENIZER_FILE).write_text(checkpoint.tokenizer, "utf-8")
        if checkpoint.template is not None:
            (partial / TEMPLATE_FILE).write_text(checkpoint.template, "utf-8")
        stage("sealing the bundle")
        return seal(partial, manifest_for(checkpoint, decoder, traits, options, parameters))


def check_activations(options: ExportOptions) -> None:
    """Raise for activations that products with these weights cannot have."""
    if options.weights == "int8" and options.activations != "float" and options.dtype != "float32":
        raise OptionFault(
            f"dtype is {options.dtype}: integer products are for the CPU, expected float32 with weights int8 (--dtype)"
        )
    if options.activations not in options.activation_choices:
        raise OptionFault(
            f"activations is {options.activations}: expected {' or '.join(options.activation_choices)} with weights "
            f"{options.weights}, {options.dtype}, {options.form} attention and the {options.lowering} lowering (--activations)"
        )


def with_supported_activations(checkpoint: Checkpoint, options: ExportOptions) -> ExportOptions:
    """The options with activations that suit the checkpoint's model.

    Where each KV head has one query head, ONNX Runtime computes the attention of a single row by another kernel, whose
    sums are in another order: with int8 activations no draft would be exact.
    """
    config = checkpoint.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    grouped = heads is not None and (getattr(config, "num_key_value_heads", None) or heads) < heads
    if options.activations != "int8" or grouped:
        return options
    if options.requested_activations == "int8":
        exact = "int8x2" if options.weights == "int8" else "float"
        raise OptionFault(
            f"activations is int8: {config.model_type} has {heads} query heads and as many KV heads, and drafts would not be "
            f"exact; expected {exact} (--activations)"
        )
    return replace(options, requested_activations="float")


def build_decoder(
    checkpoint: Checkpoint,
    options: ExportOptions,
    stage: Stage = lambda name: None,
    arithmetic: Precision | None = None,
    scales: ModelScales | None = None,
) -> tuple[Decoder, Traits]:
    """The checkpoint's model as a graph module; it may compute in another type than the one that its weights are in.

    Without scales, those of integer products are calibrated."""
    stage("loading the weights")
    with torch.no_grad():
        model = load_model(checkpoint, options.dtype)
        calibrates = scales is None and options.weights == "int8" and options.activations != "float"
        if options.weights != "same":
            stage(f"{'calibrating and ' if calibrates else ''}rounding weights to {options.weights}")
        quantization = quantize_model(
            model,
            options.weights,
            options.activations,
            options.lowering,
            scales,
            prompt_tokens(checkpoint, options.calibrate) if calibrates else (),
        )
        # As it was loaded it stays as it is: its rotary frequencies are in float32, whatever its weights are in.
        if arithmetic not in (None, options.dtype):
            model.to(getattr(torch, arithmetic))
        stage("proving the graph module equal to the model")
        return decoder_of(model, options.lowering, options.form, quantization)


def manifest_for(
    checkpoint: Checkpoint, decoder: Decoder, traits: Traits, options: ExportOptions, parameters: int
) -> Manifest:
    """The manifest of a checkpoint's bundle, no file recorded yet."""
    packages = ("torch", "transformers", "onnx", "onnxscript", "tokenizers")
    return Manifest(
        signature=decoder.signature,
        tokens=checkpoint.tokens,
        max_mask_slots=checkpoint.max_mask_slots,
        max_positions=traits.max_positions,
        family=str(checkpoint.config.model_type),
        parameters=parameters,
        opset=options.opset,
        attention=options.form,
        weights=options.weights,
        activations=options.activations,
        embeddings=decoder.quantization.embeddings,
        special_tokens=checkpoint.special_tokens,
        generation=checkpoint.generation,
        versions={
            "spaceport": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
    )
