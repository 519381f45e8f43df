"""Checkpoint: a model's folder or GGUF file with what drafts add, checked before any weight is loaded, and its weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
import transformers.utils.logging
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spaceport.exporter.checkpoint_files import (
    PARD,
    SAR_FILE,
    ModelFiles,
    SarConfig,
    config_mask_token,
    is_id,
    require_checkpoint,
)
from spaceport.exporter.converted_checkpoint import (
    checked_state,
    converted_config,
    converted_weights,
    family_of,
    published_tokenizer,
)
from spaceport.exporter.draft_files import (
    MECHANISMS,
    AdapterFolder,
    add_embeddings,
    add_special_tokens,
    apply_mechanisms,
    check_mechanisms,
    check_values,
    read_adapter_folder,
    read_mechanisms,
)
from spaceport.exporter.gguf_checkpoint import end_tokens, gguf_config, gguf_tokenizer, gguf_weights
from spaceport.exporter.gguf_file import GgufFile
from spaceport.graphs.contract.draft_methods import LOOKUP, MAX_MASK_SLOTS, UNKNOWN, DraftMethod, MaskLayout
from spaceport.graphs.contract.faults import CheckpointError
from spaceport.graphs.contract.json_fields import is_whole
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import Precision
from spaceport.graphs.decoder import freeze_rotary
from spaceport.graphs.mechanism import M, Mechanism
from spaceport.graphs.streamed_weights import keep_values, return_large_arrays, stream_matrices, with_placeholders
from spaceport.graphs.traits import decoder_layers

DEFAULT_MASK_SLOTS = 5  # as published for SPACE; used if a checkpoint names one mask token and no number


@dataclass(frozen=True)
class TokenFlags:
    """Special tokens from the command line, by id or by text; missing ones are read from sar_config.json."""

    mask: tuple[str, ...] = ()
    fork: str | None = None
    child: str | None = None
    max_mask_slots: int | None = None


Loaded = tuple[Any, dict[str, Any]]  # a model, and the loading report of transformers


@dataclass(frozen=True)
class CheckpointSource:
    """A model as its folder or file has it, without what drafts add."""

    files: ModelFiles
    config: PreTrainedConfig
    generation: Mapping[str, Any]  # generation_config.json
    # Returns a new tokenizer in each call.
    load_tokenizer: Callable[[], Any]
    # From the type of the weights, and a folder if weights may be read when they are needed.
    load_weights: Callable[[torch.dtype, Path | None], Loaded]
    streams: bool = False  # whether it can read weights when they are needed


def quiet_libraries() -> None:
    """Turn off progress bars and log messages of the libraries that an export uses; errors are still raised."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    # accelerate logs tied weights each time it saves a state, the others each rewritten operator
    for library in ("accelerate", "onnx_ir", "onnxscript"):
        logging.getLogger(library).setLevel(logging.ERROR)


def reason_of(error: BaseException) -> str:
    """The first line of a library's error message, or the first two if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(".")
    if not text:
        return type(error).__name__
    return f"{type(error).__name__}: {text}" if isinstance(error, KeyError) else text


def _folder_tokenizer(folder: Path, remote_code: bool) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=remote_code)
    except Exception as error:  # tokenizers raises Exception itself
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be read: {reason_of(error)}: expected one as save_pretrained writes it"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(
            f"{folder}: {type(tokenizer).__name__} has no fast version: expected a tokenizer that can be saved as tokenizer.json"
        )
    return tokenizer


def _config(files: ModelFiles, remote_code: bool) -> PreTrainedConfig:
    folder, content = files.path, files.config
    file = folder / "config.json"
    kind = content.get("model_type")
    if not (isinstance(kind, str) and kind in CONFIG_MAPPING) and not remote_code:
        advice = "expected one such as llama, qwen3 or mistral, or a newer transformers"
        if "auto_map" in content:
            advice = "it has its own code: use --trust-remote-code if you trust it"
        raise CheckpointError(
            f"{file}: architecture {kind!r} is not one that transformers {transformers.__version__} knows: {advice}"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=remote_code)
    except Exception as error:  # each model family raises its own exception types
        raise CheckpointError(f"{file}: {reason_of(error)}: expected a configuration of {kind!r}") from error
    remote = remote_code and "AutoModelForCausalLM" in (content.get("auto_map") or {})
    if config.is_encoder_decoder or (kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not remote):
        raise CheckpointError(
            f"{file}: {kind!r} is not a decoder-only causal language model: expected one such as llama, qwen3 or mistral"
        )
    return cast(PreTrainedConfig, config)


def model_config(files: ModelFiles, remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a GGUF file's or a checkpoint folder's model."""
    if files.gguf is not None:
        return gguf_config(files.gguf)
    return converted_config(files) if files.is_converted and not remote_code else _config(files, remote_code)


def load_with_own_attention(load: Callable[[str], Loaded]) -> Loaded:
    """A model and its loading report, with an attention implementation of transformers itself.

    The implementation is always passed, because a configuration can name one that is fetched or not installed.
    """
    try:
        return load("sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return load("eager")


def model_without_values(config: PreTrainedConfig, dtype: Precision) -> PreTrainedModel:
    """The model of a configuration on the meta device, with frozen rotary frequencies."""

    def build(attn_implementation: str) -> Loaded:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, dtype=getattr(torch, dtype)
        )
        if model._can_set_experts_implementation():
            model.set_experts_implementation("batched_mm")  # others choose experts by values
        return model, {}

    with torch.device("meta"), torch.no_grad():
        model, _ = load_with_own_attention(build)
    freeze_rotary(model)
    return cast(PreTrainedModel, model.eval())


def _load(
    kind: Any, folder: Path | None, config: PreTrainedConfig, dtype: torch.dtype, options: Mapping[str, Any]
) -> Loaded:
    """The model of a class with the weights in a folder or in the options of transformers, and the loading report."""

    def load(attn_implementation: str) -> Loaded:
        loaded: Loaded = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported by name
            **options,
        )
        return loaded

    return load_with_own_attention(load)


def _load_streamed(
    weights: Sequence[Path], config: PreTrainedConfig, dtype: torch.dtype, scratch: Path
) -> Loaded | None:
    """The model with matrices that are read when they are needed, and the loading report of transformers.

    None if transformers computes matrices of the model from several tensors of the files."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        return None
    return_large_arrays()
    state, sources = with_placeholders(weights, dtype)
    model, report = _load(kind, None, config, dtype, {"state_dict": state})
    layers = decoder_layers(model, int(config.get_text_config().num_hidden_layers))
    return (model, report) if stream_matrices(model, layers, sources, scratch) else None


def read_source(files: ModelFiles, remote_code: bool) -> CheckpointSource:
    """The configuration, tokenizer and generation config of a GGUF file or of a checkpoint folder."""
    if files.gguf is not None:
        return _gguf_source(files, files.gguf)
    if files.is_converted and not remote_code:
        return _converted_source(files)
    config = _config(files, remote_code)

    options = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": remote_code}

    def load_weights(dtype: torch.dtype, scratch: Path | None) -> Loaded:
        streamed = None if scratch is None or remote_code else _load_streamed(files.weights, config, dtype, scratch)
        return streamed or _load(AutoModelForCausalLM, files.path, config, dtype, options)

    tokenizer = partial(_folder_tokenizer, files.path, remote_code)
    return CheckpointSource(files, config, files.generation, tokenizer, load_weights, streams=not remote_code)


def _gguf_source(files: ModelFiles, gguf: GgufFile) -> CheckpointSource:
    config, generation = gguf_config(gguf), {"eos_token_id": end_tokens(gguf)}

    def load_weights(dtype: torch.dtype, scratch: Path | None) -> Loaded:
        kind, state = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], gguf_weights(gguf, config, dtype)
        return _load(kind, None, config, dtype, {"state_dict": state})

    return CheckpointSource(files, config, generation, partial(gguf_tokenizer, gguf), load_weights)


def _converted_source(files: ModelFiles) -> CheckpointSource:
    """That of a published checkpoint that is loaded as one of another family."""
    family, config = family_of(files), converted_config(files)
    checked_state(files, config)
    published = published_tokenizer(files)
    named = files.generation.get("eos_token_id")
    own = named if isinstance(named, list) else [] if named is None else [named]
    # also those with which the original code ends an answer
    generation = {**files.generation, "eos_token_id": list(dict.fromkeys([*own, *published.end]))}

    def load_weights(dtype: torch.dtype, scratch: Path | None) -> Loaded:
        return _load(family.model, None, config, dtype, {"state_dict": converted_weights(files, config, dtype)})

    return CheckpointSource(files, config, generation, lambda: copy.deepcopy(published.tokenizer), load_weights)


def special_tokens(
    masks: Sequence[str], fork: str | None, child: str | None, source: CheckpointSource, tokenizer: Any, vocab: int
) -> TokenIds:
    """The ids of special tokens, and of those that end a text."""
    ids = TokenIds(
        mask=tuple(_token_id(token, "mask", tokenizer, vocab) for token in masks),
        fork=None if fork is None else _token_id(fork, "fork", tokenizer, vocab),
        child=None if child is None else _token_id(child, "child", tokenizer, vocab),
        end=_end_ids(source.config, tokenizer, source.generation, vocab),
    )
    if (ids.fork is None) != (ids.child is None):
        raise CheckpointError(
            "a fork token needs a child token and vice versa: set both --fork-token and --child-token"
        )
    if ids.with_two_roles is not None:
        raise CheckpointError(
            f"token id {ids.with_two_roles} has two of the roles mask, fork, child and end of text: expected different "
            "tokens"
        )
    return ids


def _mask_slots(ids: TokenIds, configured: int | None, requested: int | None, mask_layout: MaskLayout) -> int:
    """The maximum number of mask slots: as requested, else as configured, else one per mask token or the default."""
    if not ids.mask:
        if requested:
            raise CheckpointError(
                f"--max-mask-slots is {requested}, but no mask token is known: set one with --mask-token"
            )
        return 0
    distinct = len(ids.mask) > 1
    slots_by_tokens = len(ids.mask) - mask_layout.lead if distinct else DEFAULT_MASK_SLOTS
    slots = next(slots for slots in (requested, configured, slots_by_tokens) if slots is not None)
    if not is_whole(slots, 1) or slots > MAX_MASK_SLOTS:
        raise CheckpointError(
            f"the number of mask slots is {slots!r}: expected 1 to {MAX_MASK_SLOTS} as --max-mask-slots, or as "
            f"mask_slots in {SAR_FILE}"
        )
    if distinct and mask_layout.rows(slots) > len(ids.mask):
        raise CheckpointError(
            f"{slots} mask slots, but {len(ids.mask)} mask tokens: expected one for each mask slot, or one for all"
            + ("; without shift, one more for the first row of a group" if mask_layout.lead else "")
        )
    return slots


def _token_id(token: str, role: str, tokenizer: Any, vocab: int) -> int:
    """The id of a token given by id or by text; digits are always an id, even where a token has this text."""
    known = int(token) if is_id(token) else tokenizer.backend_tokenizer.token_to_id(token)
    if known is None:
        raise CheckpointError(
            f"{role} token {token!r} is not in the tokenizer: expected one of its tokens, or an id from 0 to "
            f"{vocab - 1}"
        )
    if not 0 <= known < vocab:
        raise CheckpointError(
            f"{role} token {token!r} is id {known}, the model's vocabulary ends at {vocab - 1}: expected an id within "
            "it"
        )
    return int(known)


def _end_ids(config: PreTrainedConfig, tokenizer: Any, generation: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    """The end-of-text ids of the generation config, or else of the model config, or else of the tokenizer."""
    sources: Sequence[Any] = (
        generation.get("eos_token_id"),
        config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    )
    named = next((value for value in sources if value is not None), ())
    ids = tuple(named) if isinstance(named, (list, tuple)) else (named,)
    wrong = [value for value in ids if not isinstance(value, int) or not 0 <= value < vocab]
    if wrong:
        raise CheckpointError(
            f"end-of-text id {wrong[0]!r} is outside the model's vocabulary of {vocab}: correct generation_config.json"
        )
    return ids


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint without its weights."""

    source: CheckpointSource
    tokens: TokenIds
    drafts: DraftMethod
    mechanisms: tuple[Mechanism, ...]  # with which it drafts
    fork_by_default: bool  # whether a request may fork unless it says otherwise
    tokenizer: str  # content of tokenizer.json
    template: str | None  # chat template
    special_tokens: dict[str, str]
    remote_code: bool
    adapter_folder: AdapterFolder | None  # with the mechanisms; None: they are in the checkpoint

    @property
    def folder(self) -> Path:
        """The folder or GGUF file of the model."""
        return self.source.files.path

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of the model."""
        return self.source.config

    @property
    def owner(self) -> Path:
        """The folder with the mechanisms and special tokens."""
        return self.folder if self.adapter_folder is None else self.adapter_folder.path

    def mechanism(self, kind: type[M]) -> M | None:
        """The mechanism of a kind, if the checkpoint has one."""
        return next((mechanism for mechanism in self.mechanisms if isinstance(mechanism, kind)), None)

    def with_mechanism(self, mechanism: Mechanism) -> Checkpoint:
        """The checkpoint with one more mechanism, which replaces its own of that kind."""
        others = [one for one in self.mechanisms if one.name != mechanism.name]
        drafts = replace(self.drafts, mechanisms={**self.drafts.mechanisms, mechanism.name: mechanism.entry})
        return replace(self, mechanisms=(*others, mechanism), drafts=drafts)


def template_of(tokenizer: Any) -> str | None:
    """The chat template of a tokenizer, the default one of several; None if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def open_checkpoint(
    model: Path | ModelFiles, flags: TokenFlags, remote_code: bool = False, adapter: Path | None = None
) -> Checkpoint:
    """The checkpoint in a folder with its special token ids, and with what an adapter folder adds, if one is given."""
    files = model if isinstance(model, ModelFiles) else require_checkpoint(model)
    added = None if adapter is None else _adapter_folder(adapter, files)
    owner, sar = (files.path, files.sar_config) if added is None else (added.path, added.sar_config)
    mechanisms = read_mechanisms(owner, sar)
    source = read_source(files, remote_code)
    vocab_size = int(source.config.get_text_config().vocab_size)
    if added is not None:
        with _naming(files.path):
            added.base.check_config(source.config)
        vocab_size = added.vocab_size
    tokenizer = _tokenizer(source, added)
    if added is None and not flags.mask and sar.mask_tokens is None:
        pard = config_mask_token(files.path / "config.json", files.config, vocab_size)
        if pard is not None:
            sar = replace(sar, mask_tokens=(str(pard),), method=sar.method or PARD)
    fork, child = (
        named if requested is None else requested
        for requested, named in ((flags.fork, sar.fork_token), (flags.child, sar.child_token))
    )
    tokens = special_tokens(flags.mask or sar.mask_tokens or (), fork, child, source, tokenizer, vocab_size)
    check_mechanisms(owner, mechanisms, tokens)
    mask_slots = _mask_slots(tokens, sar.mask_slots, flags.max_mask_slots, sar.layout)
    named_tokens = tokenizer.special_tokens_map.items()
    return Checkpoint(
        source=source,
        tokens=tokens,
        drafts=_draft_method(replace(sar, acceptance=()) if flags.mask else sar, mechanisms, mask_slots),
        mechanisms=mechanisms,
        fork_by_default=sar.fork_by_default,
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        template=template_of(tokenizer),
        special_tokens={name: str(token) for name, token in named_tokens if isinstance(token, str)},
        remote_code=remote_code,
        adapter_folder=added,
    )


def _draft_method(sar: SarConfig, mechanisms: Sequence[Mechanism], mask_slots: int) -> DraftMethod:
    """How a model with these mechanisms and mask slots drafts."""
    heads = sum(mechanism.heads for mechanism in mechanisms)
    drafts = bool(heads or mask_slots)
    return DraftMethod(
        name=sar.method or UNKNOWN if drafts else LOOKUP,
        adapter=sar.adapter if drafts else None,
        predictor="head" if heads else "mask",
        max_tokens=heads or mask_slots,
        layout=sar.layout,
        mechanisms={mechanism.name: mechanism.entry for mechanism in mechanisms},
        acceptance=sar.acceptance,
    )


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """A transformers tokenizer of a checkpoint, which neither cuts nor pads texts."""
    return _tokenizer(checkpoint.source, checkpoint.adapter_folder)


def _tokenizer(source: CheckpointSource, added: AdapterFolder | None) -> Any:
    tokenizer = source.load_tokenizer()
    tokenizer.backend_tokenizer.no_truncation()  # some tokenizer.json files enable it
    tokenizer.backend_tokenizer.no_padding()
    if added is not None:
        with _naming(source.files.path):
            add_special_tokens(tokenizer, added)
    return tokenizer


def load_model(checkpoint: Checkpoint, dtype: Precision, scratch: Path | None = None) -> PreTrainedModel:
    """The model with the weights and mechanisms of the checkpoint.

    With a `scratch` folder, its weights are read when they are needed, if its checkpoint allows it."""
    check_values(checkpoint.owner, checkpoint.mechanisms)
    try:
        model, report = checkpoint.source.load_weights(getattr(torch, dtype), scratch)
    except CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError, ImportError) as error:
        raise CheckpointError(
            f"{checkpoint.folder}: its weights cannot be loaded: {reason_of(error)}: copy or download it again"
        ) from error
    lost = sorted(report["missing_keys"]) + sorted(str(key[0]) for key in report["mismatched_keys"])
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise CheckpointError(
            f"{checkpoint.folder}: weights {', '.join(lost[:3])}{more} are missing or of another shape: expected "
            f"every weight of {type(model).__name__}; save the checkpoint again with save_pretrained"
        )
    added = checkpoint.adapter_folder
    if added is not None:
        for parameter in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            keep_values(parameter)  # rows of these tables are replaced
        with _naming(checkpoint.folder):
            add_embeddings(model, added, dtype)
    apply_mechanisms(model, checkpoint.owner, checkpoint.mechanisms, checkpoint.tokens.mask)
    return cast(PreTrainedModel, model.eval())


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Begin the message of an error with the checkpoint's folder."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _adapter_folder(adapter: Path, base: ModelFiles) -> AdapterFolder:
    """The adapter folder; raises for a base model that drafts with mechanisms of its own."""
    for name in base.sar_config.mechanisms:
        if name not in MECHANISMS or not MECHANISMS[name].refines:
            raise CheckpointError(f"{base.path}: has {name} already: expected its base model, to add that in {adapter}")
    return read_adapter_folder(adapter)
