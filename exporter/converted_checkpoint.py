"""A published folder of a family that transformers does not ship, opened as one that it ships: model and tokenizer.

Nothing is written: names and shapes are checked when the folder is opened, and the weights are read into the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedConfig

from spaceport.exporter.checkpoint_files import GENERATION_FILE, TIKTOKEN_FILE, TOKENIZER_CONFIG, ModelFiles
from spaceport.exporter.converted_families import FAMILIES, Family, Fields
from spaceport.exporter.draft_files import read_pickled_tensors, read_tensors
from spaceport.exporter.tokenizer_models import (
    QWEN_PATTERN,
    sentencepiece_tokenizer,
    tiktoken_tokenizer,
    transformers_tokenizer,
)
from spaceport.graphs.contract.faults import CheckpointError

Shape = tuple[int, ...]

# Tables that the original code computes from the configuration and stored with the weights.
_COMPUTED = re.compile(
    r"(.+\.)?(rotary_emb|rotary_pos_emb)\.inv_freq|transformer\.h\.\d+\.attn\.(masked_bias|logn_tensor)"
)
_ADVICE = "copy or download it again"

_SENTENCEPIECE_FILE = "tokenizer.model"
_FAST_FILE = "tokenizer.json"  # not published; used if somebody added it
_LINE_BYTES = 256  # at most, of the first line of a file of ranks

# Each message begins with the token of its role and a line for metadata, which is empty here. The original code removes
# whitespace around answers before they become history.
_CHATGLM3_TEMPLATE = (
    "[gMASK]<sop>"
    "{%- for message in messages %}"
    "{{- '<|' + message['role'] + '|>\\n ' }}"
    "{{- message['content'] | trim if message['role'] == 'assistant' else message['content'] }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"
)
# ChatML with the default system message of Qwen-Chat.
_CHATML_TEMPLATE = (
    "{%- if not messages or messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)
_EXAMPLE_CHAT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Bye"},
)


@dataclass(frozen=True)
class PublishedTensor:
    """A tensor of a published checkpoint: the rows of one weight of the converted model, or of several."""

    name: str
    weights: Mapping[str, Shape]  # by name, from the first row to the last
    copy_of: str | None = None  # of a tied head: it may be missing, or has the values of this tensor

    @property
    def shape(self) -> Shape:
        shapes = list(self.weights.values())
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def published_tensors(family: Family, config: PreTrainedConfig) -> tuple[PublishedTensor, ...]:
    """The tensors of a published checkpoint, with the weights of the converted model that they hold."""

    def published_name(weight: str) -> str:
        for name, published in family.names.items():
            weight = weight.replace(name, published)
        return weight

    with torch.device("meta"):
        weights = family.model(config).state_dict()
    shapes: dict[str, dict[str, Shape]] = {}
    for weight, value in weights.items():
        shapes.setdefault(published_name(weight), {})[weight] = tuple(value.shape)
    head, embeddings = (published_name(f"{name}.weight") for name in ("lm_head", "model.embed_tokens"))
    tied = {head: embeddings} if config.tie_word_embeddings else {}
    return tuple(PublishedTensor(name, parts, tied.get(name)) for name, parts in shapes.items())


def read_state(weights: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of weight files by name.

    Large files are mapped into memory: their tensors are read when they are used."""
    state: dict[str, Tensor] = {}
    for file in weights:
        read = read_tensors if file.suffix == ".safetensors" else read_pickled_tensors
        tensors = read(file, _ADVICE)
        if twice := sorted(state.keys() & tensors.keys()):
            raise CheckpointError(f"{file}: tensor {twice[0]} is in two files: expected it in one; {_ADVICE}")
        state |= tensors
    return state


def family_of(files: ModelFiles) -> Family:
    """The family of a published checkpoint."""
    return FAMILIES[files.config["model_type"]]


def converted_config(files: ModelFiles) -> PreTrainedConfig:
    """The configuration of the converted model of a folder; raise if it cannot be converted exactly."""
    family = family_of(files)
    fields = Fields(files.path / "config.json", files.config, family.title)
    config = family.config(fields)
    if (dtype := fields.dtype()) is not None:
        config.dtype = getattr(torch, dtype)
    return config


def checked_state(files: ModelFiles, config: PreTrainedConfig) -> tuple[tuple[PublishedTensor, ...], dict[str, Tensor]]:
    """The tensors that a checkpoint must have, and those in its files, which are not read; raise if these are others."""
    expected, state = published_tensors(family_of(files), config), read_state(files.weights)
    described = f"expected the {len(expected)} tensors that config.json describes"
    if missing := [tensor.name for tensor in expected if tensor.name not in state and tensor.copy_of is None]:
        raise CheckpointError(
            f"{files.path}: tensor {_some(missing)} missing: {described}; copy or download the checkpoint again"
        )
    if unused := sorted(
        name for name in state.keys() - {tensor.name for tensor in expected} if not _COMPUTED.fullmatch(name)
    ):
        raise CheckpointError(
            f"{files.path}: tensor {_some(unused)} unknown: {described}, and no adapters, prefixes or quantized weights; "
            "merge or dequantize them with the software that wrote them"
        )
    for tensor in expected:
        if tensor.name in state and (shape := tuple(state[tensor.name].shape)) != tensor.shape:
            raise CheckpointError(
                f"{files.path}: tensor {tensor.name} has shape {shape}: expected {tensor.shape} from config.json; copy or "
                "download the checkpoint again"
            )
    return expected, state


def _some(names: list[str]) -> str:
    """The first name of a list, with the verb that follows."""
    return f"{names[0]} and {len(names) - 1} more are" if len(names) > 1 else f"{names[0]} is"


def converted_weights(files: ModelFiles, config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of the converted model by name, each with memory of its own."""
    tensors, state = checked_state(files, config)
    weights: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.copy_of is not None:
            if tensor.name in state and not torch.equal(state[tensor.name], state[tensor.copy_of]):
                raise CheckpointError(
                    f"{files.path}: tie_word_embeddings is true, but {tensor.name} differs from {tensor.copy_of}: "
                    "expected equal tensors; set tie_word_embeddings to false if the head was trained"
                )
            continue
        values = state[tensor.name]
        if not values.is_floating_point():
            raise CheckpointError(
                f"{files.path}: tensor {tensor.name} has type {values.dtype}: expected floating-point weights; "
                "download the checkpoint that is not quantized"
            )
        parts = torch.split(values, [shape[0] for shape in tensor.weights.values()])
        weights |= {name: part.to(dtype, copy=True) for name, part in zip(tensor.weights, parts, strict=True)}
    return weights


@dataclass(frozen=True)
class TokenizerFormat:
    """What the published code of a family adds to its vocabulary."""

    special: Mapping[str, str]  # special tokens by their role in transformers
    ends: tuple[str, ...]  # tokens that end an answer
    optional_ends: tuple[str, ...] = ()  # those that not every vocabulary of the family has
    begin: tuple[str, ...] = ()  # tokens before each text
    pattern: str | None = None  # by which the ranks of tiktoken split text; None: a SentencePiece model
    added: tuple[str, ...] = ()  # tokens behind the last one of the vocabulary, in this order
    unused: tuple[str, ...] = ()  # added tokens that no text becomes, because no prompt needs them
    template: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)  # texts in a folder's template, by the published text


# sop and eop are in angle brackets, as GLM-4 has them: words such as "philosophy" contain the published names.
_CHATGLM = TokenizerFormat(
    special={"eos": "</s>", "unk": "<unk>", "pad": "<unk>"},
    ends=("</s>", "<|user|>", "<|observation|>"),
    begin=("[gMASK]", "<sop>"),
    added=(
        *("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    unused=("[MASK]", "[sMASK]", "<eop>"),
    template=_CHATGLM3_TEMPLATE,
    renamed={"[gMASK]sop": "[gMASK]<sop>"},
)
# The chat models end an answer with <eoa>, a piece of every published InternLM v1 vocabulary.
_INTERNLM = TokenizerFormat(
    special={"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "</s>"},
    ends=("</s>",),
    optional_ends=("<eoa>",),
    begin=("<s>",),
)
_QWEN = TokenizerFormat(
    special={"eos": "<|endoftext|>", "pad": "<|endoftext|>"},
    ends=("<|endoftext|>",),
    pattern=QWEN_PATTERN,
    added=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205))),
)
_QWEN_CHAT = replace(_QWEN, template=_CHATML_TEMPLATE, ends=("<|endoftext|>", "<|im_end|>", "<|im_start|>"))


@dataclass(frozen=True)
class PublishedTokenizer:
    """The tokenizer of a published checkpoint."""

    tokenizer: Any  # of transformers
    end: tuple[int, ...]  # ids of the tokens that end an answer


def published_tokenizer(files: ModelFiles) -> PublishedTokenizer:
    """The tokenizer of a published checkpoint folder; raise if it cannot be converted exactly."""
    folder, published = files.path, _format_of(files)
    backend = _own_backend(folder)
    if backend is None:
        backend = _converted_backend(folder, published)
    _ids(folder, backend, *published.special.values())
    tokenizer = transformers_tokenizer(backend, published.special)
    tokenizer.chat_template = _template(files, tokenizer, published)
    optional = (text for text in published.optional_ends if backend.token_to_id(text) is not None)
    return PublishedTokenizer(tokenizer, _ids(folder, backend, *published.ends, *optional))


def _format_of(files: ModelFiles) -> TokenizerFormat:
    """The format that the settings of a folder name; raise if they name another one than those that convert."""
    published_type, settings = files.config["model_type"], files.tokenizer_config
    if published_type == "chatglm":
        _check_chatglm3(files.path)
        return _CHATGLM
    if published_type == "internlm":
        if settings.get("add_eos_token", False):
            raise CheckpointError(
                f"{files.path / TOKENIZER_CONFIG}: add_eos_token is true: expected false, prompts would end before the answer"
            )
        return _INTERNLM if settings.get("add_bos_token", True) else replace(_INTERNLM, begin=())
    chats = files.generation.get("chat_format", "raw")
    if chats not in ("raw", "chatml"):
        raise CheckpointError(
            f"{files.path / GENERATION_FILE}: chat_format is {chats!r:.60}: expected raw (base model) or chatml (chat "
            "model); correct it"
        )
    return _QWEN_CHAT if chats == "chatml" else _QWEN


def _check_chatglm3(folder: Path) -> None:
    """Raise for ChatGLM2 and GLM-4, which have the same model_type.

    ChatGLM2 has another chat format and, for 32k positions, another embedding. GLM-4 with its own code has ranks of
    tiktoken in the file of this name.
    """
    files = [file for name in (TOKENIZER_CONFIG, "tokenization_chatglm.py") if (file := folder / name).is_file()]
    texts = [file.read_text("utf-8", "replace") for file in files]
    if not any(token in text for text in texts for token in ("<|user|>", "<|observation|>")):
        raise CheckpointError(
            f"{folder}: neither tokenization_chatglm.py nor {TOKENIZER_CONFIG} names the token <|user|>: expected ChatGLM3, this "
            "may be ChatGLM2; copy these files of chatglm3-6b too (they are read as text and never run)"
        )
    file = folder / _SENTENCEPIECE_FILE
    if file.is_file():
        with file.open("rb") as stream:
            ranks = re.match(rb"[A-Za-z0-9+/=]+ \d+\r?\n", stream.read(_LINE_BYTES))
        if ranks:
            raise CheckpointError(
                f"{file}: has ranks of tiktoken, as in GLM-4: expected the SentencePiece model of ChatGLM3; use the GLM-4 release "
                "for transformers, such as glm-4-9b-chat-hf"
            )


def _own_backend(folder: Path) -> Tokenizer | None:
    """The tokenizer in a folder's tokenizer.json, if it has one."""
    file = folder / _FAST_FILE
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        if type(error) is not Exception:  # tokenizers raises Exception itself for a file that it cannot read
            raise
        raise CheckpointError(f"{file}: cannot be read: {error}: expected a tokenizer; copy it again") from error


def _converted_backend(folder: Path, published: TokenizerFormat) -> Tokenizer:
    if published.pattern is not None:
        ranks = _vocabulary_file(folder, TIKTOKEN_FILE, "the vocabulary of Qwen v1")
        return tiktoken_tokenizer(ranks, published.pattern, published.added)
    pieces = _vocabulary_file(folder, _SENTENCEPIECE_FILE, "the published SentencePiece model")
    special = tuple(published.special.values())
    return sentencepiece_tokenizer(pieces, special, published.added, published.unused, published.begin)


def _vocabulary_file(folder: Path, name: str, expected: str) -> Path:
    file = folder / name
    if not file.is_file():
        raise CheckpointError(f"{folder}: no {name} in it: expected {expected}; copy it there")
    return file


def _ids(folder: Path, backend: Tokenizer, *texts: str) -> tuple[int, ...]:
    ids = []
    for text in texts:
        token = backend.token_to_id(text)
        if token is None:
            raise CheckpointError(
                f"{folder / _FAST_FILE}: has no token {text!r}: expected the tokens of the published model; remove the file to "
                "convert the published vocabulary"
            )
        ids.append(token)
    return tuple(ids)


def _template(files: ModelFiles, tokenizer: Any, published: TokenizerFormat) -> str | None:
    """The chat template of a folder: its own, otherwise that of the published format."""
    own = _own_template(files)
    if own is None:
        return published.template
    for text, replacement in published.renamed.items():
        own = own.replace(text, replacement)
    rendered = partial(_rendered, files.path, tokenizer)
    if published.template is not None and rendered(own) == rendered(published.template):
        return published.template  # the same format, which also removes whitespace around answers
    return own


def _own_template(files: ModelFiles) -> str | None:
    file = files.path / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = files.tokenizer_config.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{files.path / TOKENIZER_CONFIG}: chat_template is {template!r:.60}: expected text; save one as {file.name}"
        )
    return template


def _rendered(folder: Path, tokenizer: Any, template: str) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            list(_EXAMPLE_CHAT), chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise CheckpointError(
            f"{folder}: its chat template cannot be rendered ({error}): expected a template for system, user and assistant"
        ) from error
    return text
