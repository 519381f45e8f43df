"""Write the bundle of a checkpoint, in the default format for a class of CPUs or in another one."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from spaceport import __version__
from spaceport.exporter.adapter_folder import embedding_rows
from spaceport.exporter.atomic_folder import check_target, require_space, writing
from spaceport.exporter.bundle_manifest import write_manifest
from spaceport.exporter.checkpoint import Checkpoint, load_model, load_tokenizer, open_checkpoint
from spaceport.exporter.checkpoint import TokenFlags as TokenFlags
from spaceport.exporter.checkpoint_files import is_converted, is_gguf
from spaceport.exporter.checkpoint_source import model_config, model_without_values
from spaceport.exporter.sar_config import CheckpointError
from spaceport.exporter.to_onnx import DEFAULT_OPSET, OnStage, check_opset, reaches_quarter, to_onnx, write_selection
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import SELECTION_FILE, TEMPLATE_FILE, TOKENIZER_FILE, Manifest
from spaceport.graphs.contract.signature import DTYPES, Activations, KvCache, Lowering, Precision, Weights
from spaceport.graphs.contract.tokenizer_bounds import UnsafeTokenizer, checked
from spaceport.graphs.decoder import AttentionImplementation, Decoder, decoder_of
from spaceport.graphs.gated import MaskAdapter
from spaceport.graphs.integer_attention import is_quantizable
from spaceport.graphs.quantization import BLOCKS, Quantization
from spaceport.graphs.quantize import integer_modules, quantizable_modules, quantize_model
from spaceport.graphs.rotation import is_rotatable
from spaceport.graphs.traits import Traits, class_name

Prompt = str | Sequence[Mapping[str, str]]  # text, or chat messages

# Activation formats for these weights and this lowering, the default first; elsewhere only float.
_ACTIVATIONS: dict[tuple[Weights, Lowering], tuple[Activations, ...]] = {
    ("int4", "scatter"): ("int8", "float"),
    ("int8", "scatter"): ("int8", "int8x2", "float"),
    ("int8", "append"): ("int8", "int8x2", "float"),
}

DEFAULT_QUESTIONS = ("Hello!", "Write a short story.", "Explain how rain forms.")
MAX_PROMPT_TOKENS = 512  # of a longer prompt, the last tokens are used

# Classes of CPUs, as runtime.backends.machine names them, whose int8 products are exact -> their measured speed
_INT8_SPEED = {
    "AMX": "steps of one row take half as long as in float32 or less",
    "VNNI without AMX": "steps of one row take half as long as in float32 or less",
    "AVX2 without VNNI": "steps of one row take half as long as in float32",
    "AVX512 without VNNI": "speed not measured on such a CPU",
    "ARM64 with 8-bit dot products": "speed not measured on such a CPU",
}
_ACCURACY = "97 % of SmolLM2-135M's tokens are those of float32; --weights same keeps float32"

# With two million weights, a step takes as long in int8 as in float32; accuracy is measured from 135 million on.
_SMALL = 20_000_000
_LEAST_SHARE = 0.5  # of the weights in layers that int8 quantizes

# Seconds on two CPU cores: of each export, of tracing a layer, and of a billion weights as they are or rounded by GPTQ.
_SECONDS, _LAYER, _COPIED, _ROUNDED = 10, 3, 30, 450


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export."""

    lowering: Lowering = "scatter"
    dtype: Precision = "float32"
    weights: Weights = "same"  # of linear layers; "same": stored in `dtype`
    attention: AttentionImplementation | None = None  # None: see attention_implementation
    requested_opset: int | None = None  # None: the lowest opset that has the lowering's operators
    tokens: TokenFlags = field(default_factory=TokenFlags)
    remote_code: bool = False
    requested_activations: Activations | None = None  # None: the default for weights and lowering
    requested_kv_cache: KvCache | None = None  # None: int8 if the model and the activations allow it
    calibrate: tuple[Prompt, ...] = ()  # calibration prompts; empty: default prompts
    adapter: Path | None = None  # adapter folder, added to the checkpoint

    @property
    def activations(self) -> Activations:
        return self.requested_activations or self.activation_choices[0]

    @property
    def activation_choices(self) -> tuple[Activations, ...]:
        """The activation formats for these weights and this lowering, the default first."""
        if self.weights == "int4" and (self.dtype, self.attention_implementation) != ("float32", "plain"):
            return ("float",)  # int8 runs on CPUs only, and its drafts are exact only with plain attention
        return _ACTIVATIONS.get((self.weights, self.lowering), ("float",))

    @property
    def rounds(self) -> bool:
        """Whether weights are rounded by GPTQ, on texts that the model samples."""
        return self.weights == "int4" or self.integers

    @property
    def integers(self) -> bool:
        """Whether products are of 8-bit integers, which run on CPUs only."""
        return self.weights == "int8" and self.activations != "float"

    @property
    def opset(self) -> int:
        return DEFAULT_OPSET[self.lowering] if self.requested_opset is None else self.requested_opset

    @property
    def attention_implementation(self) -> AttentionImplementation:
        """By default the Attention operator for the append lowering, plain attention otherwise.

        ONNX Runtime computes the operator for a single row with another kernel than for several, and int8 activations
        would turn that into other quantization steps."""
        return self.attention or ("operator" if self.lowering == "append" and not self.integers else "plain")


@dataclass(frozen=True)
class DefaultFormat:
    """Data types of an export, and why these, in one line."""

    dtype: Precision
    weights: Weights
    reason: str


GPU_FORMAT = DefaultFormat("float16", "same", "float16, for a GPU; int4 and float8 are for TensorRT (--weights)")


def default_format(checkpoint: Path, cpu_class: str, remote_code: bool = False) -> DefaultFormat:
    """The format for CPUs of a class: int8 where that is fast and its accuracy is known, otherwise float32.

    int4 is never chosen: it is smaller, but loses much quality. The checkpoint's weights are not read."""
    if cpu_class not in _INT8_SPEED:
        return _float32(f"int8 is not measured on this class of CPU ({cpu_class})")
    model = model_without_values(model_config(checkpoint, remote_code), "float32")
    weights = {id(weight): weight.numel() for weight in model.parameters()}
    total = sum(weights.values())
    quantized = sum(weights[name] for name in {id(module.weight) for module in integer_modules(model).values()})
    if total < _SMALL:
        return _float32(f"int8 gains nothing in a model of {total / 1e6:.1f} million weights")
    if quantized < _LEAST_SHARE * total:
        return _float32(f"int8 would hold only {quantized / total:.0%} of the weights of {class_name(model)}")
    return DefaultFormat("float32", "int8", f"weights int8 for {cpu_class}: {_INT8_SPEED[cpu_class]}; {_ACCURACY}")


def _float32(reason: str) -> DefaultFormat:
    return DefaultFormat("float32", "same", f"weights float32: {reason}; --weights int8 quantizes nevertheless")


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
    model = model_without_values(checkpoint.config, options.dtype)
    plain, weights, activations = DTYPES[options.dtype].bytes, options.weights, options.activations
    packed = {"int8": 1, "float8": 1, "int4": 0.5 + plain / BLOCKS[options.lowering][0]}.get(weights, plain)
    tables = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    sizes = {id(parameter): parameter.numel() for parameter in model.parameters()}
    quantized = set[int]()
    if weights != "same":
        modules = quantizable_modules(model, weights, activations, options.lowering)
        quantized = {id(module.weight) for module in modules.values()}
    if activations != "float":
        quantized |= {id(table) for table in tables}
    stored = sum(tensor.numel() for one in checkpoint.mechanisms if not one.refines for tensor in one.state().values())
    if weights == "int4" and activations == "int8" and tables[0] is tables[1]:
        stored += tables[0].numel()  # tied embeddings are separated
    stored += sum(size for name, size in sizes.items() if name in quantized)
    floats = sum(size for name, size in sizes.items() if name not in quantized)
    streamed = not (is_gguf(checkpoint.folder) or is_converted(checkpoint.folder) or checkpoint.remote_code)
    layers = checkpoint.config.get_text_config().num_hidden_layers
    seconds = _SECONDS + _LAYER * layers + (_ROUNDED if options.rounds else _COPIED) * (stored + floats) / 1e9
    return ExportEstimate(int(packed * stored + plain * floats), stored if quantized and streamed else 0, seconds)


def export(
    folder: Path, target: Path, options: ExportOptions, overwrite: bool = False, on_stage: OnStage = lambda name: None
) -> Manifest:
    """Write the bundle of the checkpoint in `folder` to `target`; an old bundle stays until the new one is complete."""
    check_opset(options.opset, options.lowering)
    check_activations(options)
    check_target(target, overwrite)
    on_stage("reading the checkpoint")
    checkpoint = open_checkpoint(folder, options.tokens, options.remote_code, options.adapter)
    try:
        checked(checkpoint.tokenizer.encode())
    except UnsafeTokenizer as error:
        raise CheckpointError(
            f"{folder}: its tokenizer could make little text into very much: {error}: expected that of a published model"
        ) from error
    options = exact_activations(checkpoint.config, options)
    estimate = estimate_export(checkpoint, options)
    on_stage(str(estimate))
    require_space(target.absolute().parent, estimate.bundle + estimate.temporary)
    with writing(target, overwrite, needed=estimate.bundle) as unfinished:
        decoder, traits = build_decoder(checkpoint, options, on_stage, scratch=unfinished)
        if options.requested_kv_cache == "int8" and decoder.signature.kv_cache != "int8":
            raise OptionFault(
                f"KV cache is int8: the layers of {class_name(decoder.model)} cannot be measured one by one; expected same "
                "(--kv-cache)"
            )
        parameters = sum(parameter.numel() for parameter in decoder.parameters()) - decoder.quantization.untied_weights
        if quantized := decoder.quantization.quantized_weights:
            on_stage(f"{quantized:,} of {parameters:,} weights are {options.weights}, the others {options.dtype}")
            on_stage(quantization_error(decoder.quantization))
        to_onnx(decoder, unfinished, options.opset, on_stage)
        if not decoder.quantization.limbs and options.lowering == "scatter":  # ONNX Runtime may run it on a GPU
            write_selection(unfinished / SELECTION_FILE, decoder.signature.vocab_size)
        (unfinished / TOKENIZER_FILE).write_text(checkpoint.tokenizer, "utf-8")
        if checkpoint.template is not None:
            (unfinished / TEMPLATE_FILE).write_text(checkpoint.template, "utf-8")
        for mechanism in checkpoint.mechanisms:
            vocab_size, rotation = decoder.signature.vocab_size, decoder.quantization.rotation
            mechanism.write_files(unfinished, decoder.model, vocab_size, rotation)
        on_stage("writing the manifest")
        return write_manifest(unfinished, manifest_for(checkpoint, decoder, traits, options, parameters))


def quantization_error(quantization: Quantization) -> str:
    """The error of the quantized weights against the checkpoint's, in one line."""
    errors = quantization.errors
    worst = max(errors, key=errors.__getitem__)
    mean = sum(errors.values()) / len(errors)
    return f"relative RMS error of quantized weights: {mean:.2%} on average, at most {errors[worst]:.2%} ({worst})"


def check_activations(options: ExportOptions) -> None:
    """Raise if the format of activations, or of keys and values, is not available with the other options."""
    if options.requested_kv_cache == "int8" and not options.integers:
        raise OptionFault(
            f"KV cache is int8, weights {options.weights}, activations {options.activations}: expected weights int8 with "
            "int8 activations (--weights int8), or KV cache same (--kv-cache)"
        )
    if options.integers and options.dtype != "float32":
        raise OptionFault(
            f"dtype is {options.dtype}: int8 layers run on CPUs only, expected float32 with weights int8 (--dtype)"
        )
    if options.activations not in options.activation_choices:
        raise OptionFault(
            f"activations is {options.activations}: expected {' or '.join(options.activation_choices)} with weights "
            f"{options.weights}, {options.dtype}, {options.attention_implementation} attention and the {options.lowering} lowering (--activations)"
        )


def exact_activations(model_config: PreTrainedConfig, options: ExportOptions) -> ExportOptions:
    """The options with an activation format that is exact, and accurate, for a model with this configuration.

    If each KV head serves one query head, ONNX Runtime computes the attention of a single row over float keys and values
    with another kernel, which sums in another order. With int8 activations of one limb, drafts would then not be exact.
    Int8 weights and activations of one limb are accurate only in a model that can be rotated.
    """
    if options.activations != "int8":
        return options
    config = model_config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    grouped = heads is not None and (getattr(config, "num_key_value_heads", None) or heads) < heads
    other: Activations = "int8x2" if options.weights == "int8" else "float"
    model = model_without_values(model_config, options.dtype) if options.weights == "int8" else None
    integers = model is not None and is_quantizable(model) and options.requested_kv_cache != "same"
    if not grouped and not integers:
        reason = f"{config.model_type} has {heads} query heads and as many KV heads, and drafts would not be exact"
    elif model is not None and not is_rotatable(model):
        reason = f"a {config.model_type} model cannot be rotated, and loses accuracy with activations of 8 bits"
    else:
        return options
    if options.requested_activations == "int8":
        raise OptionFault(f"activations is int8: {reason}; expected {other} (--activations)")
    return replace(options, requested_activations=other)


def kv_cache_of(model: PreTrainedModel, options: ExportOptions) -> KvCache:
    """How keys and values of a model are stored; the model may be without values."""
    if not options.integers:
        return "same"
    if is_quantizable(model):
        return options.requested_kv_cache or "int8"
    if options.requested_kv_cache == "int8":
        raise OptionFault(
            f"KV cache is int8: the attention of {class_name(model)} cannot be replaced; expected same (--kv-cache)"
        )
    return "same"


def build_decoder(
    checkpoint: Checkpoint,
    options: ExportOptions,
    on_stage: OnStage = lambda name: None,
    arithmetic: Precision | None = None,
    stored: Quantization | None = None,
    scratch: Path | None = None,
) -> tuple[Decoder, Traits]:
    """The checkpoint's model as an exportable module.

    Its weights are rounded to `options.dtype` and quantized; it computes in `arithmetic`, by default in the same type.
    Weights that GPTQ rounds may be those of a bundle (`stored`). With a `scratch` folder for files without a name, the
    weights of one layer at a time are in memory."""
    on_stage("loading the weights")
    with torch.no_grad():
        model = load_model(checkpoint, options.dtype, scratch)
        calibrates = stored is None and options.rounds
        if options.weights != "same":
            on_stage(f"{'calibrating and ' if calibrates else ''}quantizing weights to {options.weights}")
        quantization = quantize_model(
            model,
            options.weights,
            options.activations,
            options.lowering,
            stored,
            prompt_tokens(checkpoint, options.calibrate) if calibrates else (),
            added_tokens(checkpoint, model) if calibrates else (),
            partial(_report, on_stage),
            kv_cache_of(model, options) if calibrates else "same",
        )
        # Not converted if the type is the same: rotary frequencies stay in float32 whatever the type of the weights.
        if arithmetic not in (None, options.dtype):
            model.to(getattr(torch, arithmetic))
        on_stage("comparing the wrapped model with the unmodified model")
        return decoder_of(model, options.lowering, options.attention_implementation, quantization)


def _report(on_stage: OnStage, sentence: str, done: int, total: int) -> None:
    """Report every quarter of a part of the work."""
    if reaches_quarter(done - 1, done, total):
        on_stage(sentence.format(done, total))


def prompt_tokens(checkpoint: Checkpoint, prompts: Sequence[Prompt]) -> tuple[Tensor, ...]:
    """The token ids of each prompt, 1 x tokens; messages are rendered with the checkpoint's chat template.

    Without prompts: a few default questions if the checkpoint has a chat template, otherwise none."""
    if not prompts:
        prompts = (
            []
            if checkpoint.template is None
            else [[{"role": "user", "content": question}] for question in DEFAULT_QUESTIONS]
        )
    if not prompts:
        return ()
    tokenizer = load_tokenizer(checkpoint)
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        if not isinstance(prompt, str) and checkpoint.template is None:
            raise InputFault(
                f"calibration prompt {number} has chat messages, but {checkpoint.folder} has no chat template: expected text"
            )
        text = (
            prompt
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(
                [dict(message) for message in prompt], tokenize=False, add_generation_prompt=True
            )
        )
        ids = tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"][-MAX_PROMPT_TOKENS:]
        if not ids:
            raise InputFault(f"calibration prompt {number} has no tokens: expected a prompt that is not empty")
        encoded.append(torch.tensor([ids]))
    return tuple(encoded)


def added_tokens(checkpoint: Checkpoint, model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that a gated adapter added to its base model, and the padding of the embedding table behind them.

    Without them in its calibration texts, an int8 bundle computes ordinary rows like a bundle of the base model.
    """
    if checkpoint.mechanism(MaskAdapter) is None:
        return ()
    tokens = checkpoint.tokens
    named = {*tokens.mask, *tokens.fork_ids, *(() if tokens.child is None else (tokens.child,))}
    known = Tokenizer.from_str(checkpoint.tokenizer).get_vocab_size(with_added_tokens=True)
    return tuple(sorted(named | set(range(known, len(embedding_rows(model)[0])))))


def manifest_for(
    checkpoint: Checkpoint, decoder: Decoder, traits: Traits, options: ExportOptions, parameters: int
) -> Manifest:
    """The manifest of a checkpoint's bundle, still without file records."""
    packages = ("torch", "transformers", "onnx", "onnxscript", "tokenizers")
    return Manifest(
        signature=decoder.signature,
        tokens=checkpoint.tokens,
        drafts=checkpoint.drafts,
        max_positions=traits.max_positions,
        model_type=str(checkpoint.config.model_type),
        parameters=parameters,
        opset=options.opset,
        attention=options.attention_implementation,
        weights=options.weights,
        activations=options.activations,
        embeddings=decoder.quantization.embeddings,
        fork_by_default=checkpoint.fork_by_default,
        special_tokens=checkpoint.special_tokens,
        generation_config=checkpoint.source.generation,
        provenance=checkpoint.source.provenance,
        versions={
            "spaceport": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
    )
