"""GGUF tokenizer: the tokenizer of a GGUF file, corrected and verified against the file's own metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from spaceport.exporter.gguf_file import GgufFile
from spaceport.exporter.sar_config import CheckpointError

# Pre-tokenizers by llama.cpp's names, grouped by how they split text
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe")  # a word that is a token is not merged; BOS is added by default
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")  # GPT-2's, each digit on its own
PRE_TOKENIZERS = (*_LLAMA3, *_QWEN2, *_GPT2, *_SINGLE_DIGITS)
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTROL, _USER_DEFINED = 3, 4  # token types of llama.cpp

_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
_END = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of a turn, of a message


def gguf_tokenizer(file: GgufFile) -> Any:
    """The tokenizer of a GGUF file; raise if it differs from the file's metadata.

    transformers can load it too, but ignores some pre-tokenizers and may add tokens.
    """
    _check_kind(file)
    _check_types(file)
    vocabulary = {text: token for token, text in enumerate(file.get("tokens"))}
    backend = Tokenizer(models.BPE(vocabulary, _merges(file, vocabulary), ignore_merges=file.get("pre") in _LLAMA3))
    backend.pre_tokenizer = _pre_tokenizer(file.get("pre"))
    backend.decoder = decoders.ByteLevel()
    for text, kind in zip(file.get("tokens"), file.get("token_type"), strict=True):
        if kind == _CONTROL:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(text, special=False, normalized=False)])
    special = {
        f"{name}_token": file.get("tokens")[file.get(key)]
        for name, key in _SPECIAL.items()
        if file.get(key) is not None
    }
    if _adds_bos(file):
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, file.get("bos_token_id"))]
        )
    template = file.metadata.get("tokenizer.chat_template")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, clean_up_tokenization_spaces=False, **special
    )
    _verify(file, tokenizer)
    return tokenizer


def end_tokens(file: GgufFile) -> list[int]:
    """Ids of all end-of-text tokens in the file's metadata."""
    return list(dict.fromkeys(int(file.get(key)) for key in _END if file.get(key) is not None))


def _check_kind(file: GgufFile) -> None:
    kind, pre = file.get("model"), file.get("pre")
    if kind != "gpt2":
        raise CheckpointError(
            f"{file.path}: tokenizer {kind!r} is not supported in GGUF files: expected 'gpt2', a byte-level BPE; export the "
            "original checkpoint"
        )
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path}: pre-tokenizer {pre!r} is not supported: expected one of {', '.join(PRE_TOKENIZERS)}; export the "
            "original checkpoint"
        )
    if file.get("add_eos_token", False):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.add_eos_token is true: expected false, prompts would end before the answer"
        )


def _check_types(file: GgufFile) -> None:
    """Raise for values of another type than the tokenizer needs, and for ids that no token has."""
    tokens, kinds = _list(file, "tokens", str), _list(file, "token_type", int)
    _list(file, "merges", str)
    if len(set(tokens)) != len(tokens):
        twice = next(text for text in tokens if tokens.count(text) > 1)
        raise _invalid(file, "tokens", f"has {_shown(twice)} twice", "different texts")
    if len(kinds) != len(tokens):
        raise _invalid(file, "token_type", f"has {len(kinds)} entries", f"one for each of {len(tokens)} tokens")
    for key in dict.fromkeys((*_SPECIAL.values(), *_END)):
        token = file.get(key)
        if token is not None and (type(token) is not int or not 0 <= token < len(tokens)):
            raise _invalid(file, key, f"is {_shown(token)}", f"the id of one of {len(tokens)} tokens")
    for key in ("add_bos_token", "add_eos_token"):
        if type(file.get(key, False)) is not bool:
            raise _invalid(file, key, f"is {_shown(file.get(key))}", "true or false")
    if _adds_bos(file) and file.get("bos_token_id") is None:
        raise _invalid(file, "bos_token_id", "is missing", "the id of the token that begins a prompt")
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{file.path}: tokenizer.chat_template is {_shown(template)}: expected text; convert the model again"
        )


def _list(file: GgufFile, key: str, kind: type) -> list[Any]:
    """A list in the metadata whose items have this type."""
    found = file.get(key)
    if not isinstance(found, list) or not found or not all(type(item) is kind for item in found):
        raise _invalid(file, key, f"is {_shown(found)}", f"a list of {'texts' if kind is str else 'numbers'}")
    return found


def _merges(file: GgufFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that are merged, in order."""
    merges = []
    for number, merge in enumerate(file.get("merges")):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise _invalid(file, "merges", f"has {_shown(merge)} as entry {number}", "two tokens that make a third one")
        merges.append((left, right))
    return merges


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that llama.cpp calls by this name."""
    if pre in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _SINGLE_DIGITS:
        digits: pre_tokenizers.PreTokenizer = pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated")
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    numbers = r"\p{N}{1,3}" if pre in _LLAMA3 else r"\p{N}"
    split = pre_tokenizers.Split(Regex(f"{_WORDS}|{numbers}|{_REST}"), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _adds_bos(file: GgufFile) -> bool:
    return bool(file.get("add_bos_token", file.get("pre") in _LLAMA3))


def _verify(file: GgufFile, tokenizer: Any) -> None:
    """Raise if vocabulary, special tokens, chat template or BOS differ from the metadata."""
    backend = tokenizer.backend_tokenizer
    for token, text in enumerate(file.get("tokens")):
        _equal(file, f"token {token}", backend.id_to_token(token), text)
    _equal(file, "number of tokens", backend.get_vocab_size(), len(file.get("tokens")))
    for name, key in _SPECIAL.items():
        _equal(file, f"tokenizer.ggml.{key}", getattr(tokenizer, f"{name}_token_id"), file.get(key))
    _equal(file, "tokenizer.chat_template", tokenizer.chat_template, file.metadata.get("tokenizer.chat_template"))
    bos = [file.get("bos_token_id")] if _adds_bos(file) else []
    bare = backend.encode("a", add_special_tokens=False).ids
    _equal(file, "encoding of 'a'", backend.encode("a").ids, bos + bare)


def _equal(file: GgufFile, what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise CheckpointError(
            f"{file.path}: {what} is {found!r} after loading: expected {expected!r}, as in the file; export the original "
            "checkpoint"
        )


def _invalid(file: GgufFile, key: str, found: str, expected: str) -> CheckpointError:
    return CheckpointError(f"{file.path}: tokenizer.ggml.{key} {found}: expected {expected}; convert the model again")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
