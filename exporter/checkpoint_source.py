"""Checkpoint source: configuration, tokenizer, weights and provenance of a checkpoint folder or GGUF file."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
import transformers.utils.logging
from safetensors import safe_open
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spaceport.exporter.checkpoint_files import ModelFiles
from spaceport.exporter.converted_checkpoint import (
    checked_state,
    converted_config,
    load_converted,
    published_tokenizer,
)
from spaceport.exporter.gguf_checkpoint import end_tokens, gguf_config, gguf_tokenizer, load_gguf_weights
from spaceport.exporter.gguf_file import GgufFile
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.contract.signature import Precision
from spaceport.graphs.decoder import freeze_rotary
from spaceport.graphs.streamed_weights import (
    Parts,
    Streamed,
    in_parts,
    placeholder,
    read_when_called,
    return_large_arrays,
    stream,
)
from spaceport.graphs.traits import decoder_layers

_MOST = 200  # characters of an entry
_CARD_BYTES = 2**16  # of a model card, whose first lines hold the licence

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

    @property
    def provenance(self) -> dict[str, str]:
        """Name, source, revision and licence of the model, without those that are not known."""
        return provenance_of(self.files.path, None if self.files.gguf is None else self.files.gguf.metadata)


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


def _tokenizer(folder: Path, remote_code: bool) -> Any:
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
        own_code = "it has its own code: use --trust-remote-code if you trust it"
        raise CheckpointError(
            f"{file}: architecture {kind!r} is not one that transformers {transformers.__version__} knows: "
            + (
                own_code
                if "auto_map" in content
                else "expected one such as llama, qwen3 or mistral, or a newer transformers"
            )
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


def read_source(files: ModelFiles, remote_code: bool) -> CheckpointSource:
    """The configuration, tokenizer and generation config of a GGUF file or of a checkpoint folder."""
    if files.gguf is not None:
        return _gguf_source(files, files.gguf)
    if files.is_converted and not remote_code:
        return _converted_source(files)
    config = _config(files, remote_code)

    def load(attn_implementation: str, dtype: torch.dtype) -> Loaded:
        kind: Any = AutoModelForCausalLM
        loaded: Loaded = kind.from_pretrained(
            files.path,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported by name
        )
        return loaded

    def load_weights(dtype: torch.dtype, scratch: Path | None) -> Loaded:
        streamed = None if scratch is None or remote_code else load_streamed(files.weights, config, dtype, scratch)
        return streamed or load_with_own_attention(partial(load, dtype=dtype))

    return CheckpointSource(
        files,
        config,
        files.generation,
        partial(_tokenizer, files.path, remote_code),
        load_weights,
        streams=not remote_code,
    )


def _gguf_source(files: ModelFiles, gguf: GgufFile) -> CheckpointSource:
    config = gguf_config(gguf)
    return CheckpointSource(
        files,
        config,
        {"eos_token_id": end_tokens(gguf)},
        partial(gguf_tokenizer, gguf),
        lambda dtype, scratch: load_with_own_attention(partial(load_gguf_weights, gguf, config, dtype)),
    )


def _converted_source(files: ModelFiles) -> CheckpointSource:
    """That of a published checkpoint that is loaded as one of another family."""
    config = converted_config(files)
    checked_state(files, config)
    published = published_tokenizer(files)
    named = files.generation.get("eos_token_id")
    own = named if isinstance(named, list) else [] if named is None else [named]
    # also those with which the original code ends an answer
    ends = list(dict.fromkeys([*own, *published.end]))
    return CheckpointSource(
        files,
        config,
        {**files.generation, "eos_token_id": ends},
        lambda: copy.deepcopy(published.tokenizer),
        lambda dtype, scratch: load_with_own_attention(partial(load_converted, files, config, dtype)),
    )


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


@dataclass(frozen=True)
class _Stored:
    """A tensor in a safetensors file."""

    file: Path
    name: str

    def parts(self) -> Parts:
        with safe_open(self.file, "pt") as opened:
            stored = opened.get_slice(self.name)
            yield from in_parts(stored.get_shape(), stored.__getitem__)


def load_streamed(
    weights: Sequence[Path], config: PreTrainedConfig, dtype: torch.dtype, scratch: Path
) -> Loaded | None:
    """The model with matrices that are read when they are needed, and the loading report of transformers.

    None if transformers computes matrices of the model from several tensors of the files."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        return None
    return_large_arrays()
    state, stored = _state(weights, dtype)
    from_pretrained: Any = kind.from_pretrained

    def load(attn_implementation: str) -> Loaded:
        loaded: Loaded = from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported by name
        )
        return loaded

    model, report = load_with_own_attention(load)
    sources = {state[name].data_ptr(): source for name, source in stored.items()}
    parameters = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    if any(parameter.dtype != dtype or parameter.data_ptr() not in sources for parameter in parameters):
        return None
    for parameter in parameters:
        stream(parameter, Streamed(sources[parameter.data_ptr()].parts, scratch))
    read_when_called(model, decoder_layers(model, int(config.get_text_config().num_hidden_layers)))
    return model, report


def _state(files: Sequence[Path], dtype: torch.dtype) -> tuple[dict[str, Tensor], Mapping[str, _Stored]]:
    """The tensors of the files by name, with placeholders of matrices, and where those are."""
    state: dict[str, Tensor] = {}
    stored: dict[str, _Stored] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                if len(part.get_shape()) > 1 and part.get_dtype() in ("F64", "F32", "F16", "BF16"):
                    state[name] = placeholder(torch.Size(part.get_shape()), dtype)
                    stored[name] = _Stored(file, name)
                else:
                    state[name] = opened.get_tensor(name).clone()
    return state, stored


def provenance_of(folder: Path, metadata: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Name, source, revision and licence of a checkpoint, without those that are not known.

    A folder in the cache of a model hub says its source and revision; a model card says the licence, and a GGUF file
    (`metadata`) can say all of them.
    """
    path = folder.absolute()
    origin: dict[str, Any] = {"name": path.stem if metadata is not None else path.name}
    cached = re.search(r"/models--([^/]+)/snapshots/([0-9a-f]{40})(?:/|$)", str(path))
    if cached is not None:
        source = cached[1].replace("--", "/", 1)
        origin |= {"name": source.rpartition("/")[2], "source": source, "revision": cached[2]}
    if metadata is not None:
        keys = {"name": "general.name", "source": "general.source.url", "licence": "general.license"}
        origin |= {entry: metadata.get(key) or origin.get(entry) for entry, key in keys.items()}
    elif (licence := _licence(path / "README.md")) is not None:
        origin["licence"] = licence
    return {entry: value[:_MOST] for entry, value in origin.items() if isinstance(value, str) and value.isprintable()}


def _licence(card: Path) -> str | None:
    """The licence in the first block of a model card."""
    try:
        if not card.is_file():
            return None
        with card.open("rb") as stream:
            text = stream.read(_CARD_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    block = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    line = re.search(r"^license:[ \t]*[\"']?([^\s\"']+)", block[1], re.MULTILINE) if block else None
    return line[1] if line else None
