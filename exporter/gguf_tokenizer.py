"""The tokenizer of a GGUF file, built from the file's metadata and verified against it.

transformers can load it too, but ignores some pre-tokenizers and may add tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from spaceport.exporter.gguf_file import GgufFile
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
