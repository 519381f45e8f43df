"""Configuration, tokenizer and weights of a GGUF file, each compared with its metadata.

transformers dequantizes the weights. It can load the tokenizer too, but ignores some pre-tokenizers and may add tokens.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, cast

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    modeling_gguf_pytorch_utils,
)
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from spaceport.exporter.gguf_file import ARRAY, NUMBERS, STRING, GgufFile
from spaceport.exporter.sar_config import CheckpointError
from spaceport.exporter.tokenizer_models import (
    LLAMA3_PATTERN,
    QWEN_PATTERN,
    add_tokens,
    begin_texts,
    byte_level_splitter,
    byte_level_tokenizer,
    transformers_tokenizer,
)
from spaceport.graphs.contract.json_fields import short

# Shapes of tensors by sizes of the model, the innermost dimension first
_MODEL = {
    "token_embd.weight": ("hidden", "vocabulary"),
    "output_norm.weight": ("hidden",),
    "output.weight": ("hidden", "vocabulary"),  # missing: tied to the embeddings
}
_LAYER_LINEAR = {
    "attn_q": ("hidden", "queries"),
    "attn_k": ("hidden", "keys"),
    "attn_v": ("hidden", "keys"),
    "attn_output": ("queries", "hidden"),
    "ffn_gate": ("hidden", "inner"),
    "ffn_up": ("hidden", "inner"),
    "ffn_down": ("inner", "hidden"),
}
_LAYER = {
    **{f"{name}.weight": shape for name, shape in _LAYER_LINEAR.items()},
    **{f"{name}.weight": ("hidden",) for name in ("attn_norm", "ffn_norm")},
}
_LAYER_OPTIONAL = {  # of some architectures
    **{f"{name}.bias": shape[1:] for name, shape in _LAYER_LINEAR.items()},
    **{f"{name}.weight": ("head_dim",) for name in ("attn_q_norm", "attn_k_norm")},
}

_HEAD_DIM_KEYS = ("attention.key_length", "attention.value_length")
_LONGEST = 256  # items of arrays and bytes of texts that transformers gets; it needs hyperparameters only
_TEXT_HEAD, _ARRAY_HEAD = struct.Struct("<Q"), struct.Struct("<IQ")

# How text is split, by llama.cpp's names of pre-tokenizers: the pattern, and whether that of GPT-2 follows
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe")  # a word that is a token is not merged; BOS is added by default
_SPLITS: dict[str, tuple[str | None, bool]] = {
    **dict.fromkeys(_LLAMA3, (LLAMA3_PATTERN, False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (QWEN_PATTERN, False)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe"), (None, True)),
    # each digit on its own
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", True)),
}
_CONTROL, _USER_DEFINED = 3, 4  # token types of llama.cpp

_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
_END = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of a turn, of a message


@dataclass(frozen=True)
class Hyperparameters:
    """Sizes of a model, each at least 1."""

    hidden: int
    layers: int
    inner: int  # of the feed-forward layers
    heads: int
    kv_heads: int
    head_dim: int


def hyperparameters_of(file: GgufFile) -> Hyperparameters:
    """The hyperparameters of a file; raise if one is missing or invalid, or if they contradict each other."""
    _check_names(file)
    hidden, heads = _size(file, "embedding_length"), _size(file, "attention.head_count")
    kv_heads = _size(file, "attention.head_count_kv", heads)
    if heads % kv_heads:
        file.refuse(f"attention.head_count is {heads}", f"a multiple of {kv_heads} key and value heads")
    if _stated(file, "attention.key_length") is None and hidden % heads:
        file.refuse(f"embedding_length is {hidden}", f"a multiple of {heads} heads")
    head_dim = _size(file, "attention.key_length", hidden // heads)
    sizes = Hyperparameters(
        hidden, _size(file, "block_count"), _size(file, "feed_forward_length"), heads, kv_heads, head_dim
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        if (stated := _size(file, key, head_dim)) != head_dim:
            file.refuse(
                f"{file.architecture}.{key} is {stated}, the head size is {head_dim}",
                "equal sizes",
                "export the original checkpoint",
            )
    if head_dim % 2:
        file.refuse(f"the head size is {head_dim}", "an even number, for rotary embeddings")
    _size(file, "context_length")
    _check_positive(file, "attention.layer_norm_rms_epsilon")
    if _stated(file, "rope.freq_base") is not None:
        _check_positive(file, "rope.freq_base")
    return sizes


def _check_names(file: GgufFile) -> None:
    """Raise for hyperparameters that transformers ignores, such as RoPE scaling."""
    mapping: Any = GGUF_CONFIG_MAPPING
    known = {*mapping[file.architecture], *_HEAD_DIM_KEYS}
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{file.architecture}.")
        if name != key and name not in known and (name, value) != ("rope.scaling.type", "none"):
            file.refuse(
                f"{key} is {short(value)}, which cannot be loaded from GGUF files",
                "a model without it",
                "export the original checkpoint",
            )


def check_shapes(file: GgufFile, hyperparameters: Hyperparameters) -> None:
    """Raise if a tensor that the hyperparameters require is missing or has another shape."""
    for name, shape, required in _shapes(
        hyperparameters, vocabulary_of(file)
    ):  # no list: the number of layers may be absurd
        tensor = file.tensors.get(name)
        if tensor is None and required:
            file.refuse(f"tensor {name} is missing", f"the tensors of {hyperparameters.layers} layers")
        if tensor is not None and tensor.shape != shape:
            file.refuse(f"tensor {name} has shape {short(tensor.shape)}", f"{short(shape)} from the hyperparameters")


def vocabulary_of(file: GgufFile) -> int:
    """The number of tokens of a model."""
    tokens = file.get("tokens")
    return _size(file, "vocab_size", len(tokens) if isinstance(tokens, list) else 0)


def _shapes(hyperparameters: Hyperparameters, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Names and shapes of a model's tensors, and whether every model has the tensor."""
    sizes = {
        "hidden": hyperparameters.hidden,
        "inner": hyperparameters.inner,
        "head_dim": hyperparameters.head_dim,
        "queries": hyperparameters.heads * hyperparameters.head_dim,
        "keys": hyperparameters.kv_heads * hyperparameters.head_dim,
        "vocabulary": vocabulary,
    }
    for name, dimensions in _MODEL.items():
        yield name, tuple(sizes[dimension] for dimension in dimensions), name != "output.weight"
    for layer in range(hyperparameters.layers):
        for tensors, required in ((_LAYER, True), (_LAYER_OPTIONAL, False)):
            for name, dimensions in tensors.items():
                yield f"blk.{layer}.{name}", tuple(sizes[dimension] for dimension in dimensions), required


def _stated(file: GgufFile, key: str, default: int | None = None) -> Any:
    return file.metadata.get(f"{file.architecture}.{key}", default)


def _size(file: GgufFile, key: str, default: int | None = None) -> int:
    value = _stated(file, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _refuse_value(file, key, value, "a whole number of at least 1")
    return value


def _check_positive(file: GgufFile, key: str) -> None:
    value = _stated(file, key)
    if not isinstance(value, float) or not (math.isfinite(value) and value > 0):
        _refuse_value(file, key, value, "a floating-point number above 0")


def _refuse_value(file: GgufFile, key: str, value: Any, expected: str) -> NoReturn:
    problem = "is missing" if value is None else "is an array" if isinstance(value, list) else f"is {short(value)}"
    file.refuse(f"{file.architecture}.{key} {problem}", expected)


def gguf_config(file: GgufFile) -> PreTrainedConfig:
    """The configuration of a GGUF file's model; raise if it does not fit the file's tensors."""
    hyperparameters = hyperparameters_of(file)
    check_shapes(file, hyperparameters)
    try:
        with _lean_loader():
            config = AutoConfig.from_pretrained(file.path.parent, gguf_file=file.path.name, local_files_only=True)
    except Exception as error:  # each model family raises its own exception types
        message = " ".join(str(error).split())
        message = message if len(message) <= 200 else f"{message[:199]}…"
        raise CheckpointError(
            f"{file.path}: its metadata cannot be loaded ({message}): expected that of a {file.architecture} model; "
            "convert the model again"
        ) from error
    config.head_dim = hyperparameters.head_dim  # transformers has its own default
    config.vocab_size = vocabulary_of(file)  # the number of tokens, which it does not see
    return cast(PreTrainedConfig, config)


def load_gguf_weights(
    file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str
) -> tuple[Any, dict[str, Any]]:
    """The model with dequantized weights and the loading report of transformers; no quantizer is left in it."""
    with _lean_loader():
        load: Any = AutoModelForCausalLM.from_pretrained
        model, report = load(
            file.path.parent,
            gguf_file=file.path.name,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported by name
        )
        remove_quantizer(model)
        mapper: Any = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)
        used: dict[str, str] = get_gguf_hf_weights_map(model, mapper(config=model.config.to_dict()))
    ignored = sorted(file.tensors.keys() - used.keys())  # such as RoPE factors
    if ignored:
        file.refuse(
            f"tensor {ignored[0]} has no counterpart in {type(model).__name__}",
            "none but its weights",
            "export the original checkpoint",
        )
    return model, report


def remove_quantizer(model: PreTrainedModel) -> None:
    """Remove what marks a model as quantized: its weights are dequantized, and it could not be saved or trained."""
    for name in ("hf_quantizer", "quantization_method", "_is_quantized", "is_quantized"):
        if name in vars(model):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _text_size(data: Any, start: int) -> int:
    """The bytes of a text with its length."""
    size: int = _TEXT_HEAD.unpack_from(data, start)[0]
    return _TEXT_HEAD.size + size


def _long_size(data: Any, start: int, kind: int) -> int:
    """The bytes of a text or array of metadata; 0 for those that are short, and for other values."""
    if kind == STRING:
        size = _text_size(data, start)
        return size if size > _LONGEST else 0
    item, count = _ARRAY_HEAD.unpack_from(data, start) if kind == ARRAY else (0, 0)
    if count <= _LONGEST:
        return 0
    end = start + _ARRAY_HEAD.size
    if item in NUMBERS:
        end += count * np.dtype(NUMBERS[item]).itemsize
    else:
        for _ in range(count):
            end += _text_size(data, end)
    return end - start


@contextmanager
def _lean_loader() -> Iterator[None]:
    """The time in which transformers loads GGUF files without progress bars, long texts and the items of long arrays.

    It makes the map of tensor names for each module: 12 of 14 s of loading a model with 794 modules."""
    import gguf

    class LeanReader(gguf.GGUFReader):
        """Makes no objects for long arrays, such as vocabularies, whose items take a kilobyte each."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            size = _long_size(self.data, orig_offs, raw_type)
            return (size, [], [], [raw_type]) if size else super()._get_field_parts(orig_offs, raw_type)

    loader: Any = modeling_gguf_pytorch_utils
    package: Any = gguf
    before = loader.tqdm, package.GGUFReader, package.get_tensor_name_map
    loader.tqdm, package.GGUFReader = (lambda items, **options: items), LeanReader
    package.get_tensor_name_map = cache(package.get_tensor_name_map)
    try:
        yield
    finally:
        loader.tqdm, package.GGUFReader, package.get_tensor_name_map = before


def gguf_tokenizer(file: GgufFile) -> Any:
    """The transformers tokenizer of a GGUF file; raise if it differs from the file's metadata."""
    _check_kind(file)
    _check_types(file)
    tokens, pre = file.get("tokens"), file.get("pre")
    vocabulary = {text: token for token, text in enumerate(tokens)}
    splitter = byte_level_splitter(*_SPLITS[pre])
    backend = byte_level_tokenizer(vocabulary, _merges(file, vocabulary), splitter, whole_parts=pre in _LLAMA3)
    kinds = file.get("token_type")
    add_tokens(backend, [text for text, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL])
    user_defined = [text for text, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    add_tokens(backend, user_defined, special=False)
    special = {role: tokens[file.get(key)] for role, key in _SPECIAL.items() if file.get(key) is not None}
    if _adds_bos(file):
        begin_texts(backend, (special["bos"],))
    tokenizer = transformers_tokenizer(backend, special, file.metadata.get("tokenizer.chat_template"))
    _verify(file, tokenizer)
    return tokenizer


def end_tokens(file: GgufFile) -> list[int]:
    """Ids of all end-of-text tokens in the file's metadata."""
    tokens = {key: file.get(key) for key in _END if file.get(key) is not None}
    for key, token in tokens.items():
        if type(token) is not int:
            file.refuse(f"tokenizer.ggml.{key} is {short(token)}", "the id of a token")
    return list(dict.fromkeys(tokens.values()))


def _check_kind(file: GgufFile) -> None:
    kind, pre = file.get("model"), file.get("pre")
    original = "export the original checkpoint"
    if kind != "gpt2":
        file.refuse(f"tokenizer {kind!r} is not supported in GGUF files", "'gpt2', a byte-level BPE", original)
    if not isinstance(pre, str) or pre not in _SPLITS:
        file.refuse(f"pre-tokenizer {pre!r} is not supported", f"one of {', '.join(_SPLITS)}", original)
    if file.get("add_eos_token", False):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.add_eos_token is true: expected false, prompts would end before the answer"
        )


def _check_types(file: GgufFile) -> None:
    """Raise for values of another type than the tokenizer needs, and for ids that no token has."""
    tokens, kinds = _list(file, "tokens", str), _list(file, "token_type", int)
    _list(file, "merges", str)
    if len(set(tokens)) != len(tokens):
        ((twice, _),) = Counter(tokens).most_common(1)
        file.refuse(f"tokenizer.ggml.tokens has {short(twice)} twice", "different texts")
    if len(kinds) != len(tokens):
        file.refuse(f"tokenizer.ggml.token_type has {len(kinds)} entries", f"one for each of {len(tokens)} tokens")
    for key in dict.fromkeys((*_SPECIAL.values(), *_END)):
        token = file.get(key)
        if token is not None and (type(token) is not int or not 0 <= token < len(tokens)):
            file.refuse(f"tokenizer.ggml.{key} is {short(token)}", f"the id of one of {len(tokens)} tokens")
    for key in ("add_bos_token", "add_eos_token"):
        if type(file.get(key, False)) is not bool:
            file.refuse(f"tokenizer.ggml.{key} is {short(file.get(key))}", "true or false")
    if _adds_bos(file) and file.get("bos_token_id") is None:
        file.refuse("tokenizer.ggml.bos_token_id is missing", "the id of the token that begins a prompt")
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        file.refuse(f"tokenizer.chat_template is {short(template)}", "text")


def _list(file: GgufFile, key: str, kind: type) -> list[Any]:
    """A list in the metadata whose items have this type."""
    items = file.get(key)
    if not isinstance(items, list) or not items or not all(type(item) is kind for item in items):
        file.refuse(f"tokenizer.ggml.{key} is {short(items)}", f"a list of {'texts' if kind is str else 'numbers'}")
    return items


def _merges(file: GgufFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that are merged, in order."""
    merges = []
    for number, merge in enumerate(file.get("merges")):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            file.refuse(
                f"tokenizer.ggml.merges has {short(merge)} as entry {number}", "two tokens that make a third one"
            )
        merges.append((left, right))
    return merges


def _adds_bos(file: GgufFile) -> bool:
    return bool(file.get("add_bos_token", file.get("pre") in _LLAMA3))


def _verify(file: GgufFile, tokenizer: Any) -> None:
    """Raise if vocabulary, special tokens, chat template or BOS differ from the metadata."""
    backend, tokens, template = tokenizer.backend_tokenizer, file.get("tokens"), "tokenizer.chat_template"
    bos = [file.get("bos_token_id")] if _adds_bos(file) else []
    bare = backend.encode("a", add_special_tokens=False).ids
    loaded_and_stated = [
        *((f"token {token}", backend.id_to_token(token), text) for token, text in enumerate(tokens)),
        ("number of tokens", backend.get_vocab_size(), len(tokens)),
        *(
            (f"tokenizer.ggml.{key}", getattr(tokenizer, f"{role}_token_id"), file.get(key))
            for role, key in _SPECIAL.items()
        ),
        (template, tokenizer.chat_template, file.metadata.get(template)),
        ("encoding of 'a'", backend.encode("a").ids, bos + bare),
    ]
    for what, loaded, stated in loaded_and_stated:
        if loaded != stated:
            file.refuse(
                f"{what} is {loaded!r} after loading", f"{stated!r}, as in the file", "export the original checkpoint"
            )
