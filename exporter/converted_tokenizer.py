"""Tokenizer: the published tokenizers of ChatGLM3, InternLM v1 and Qwen v1, with special tokens and chat formats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from spaceport.exporter.checkpoint_files import TIKTOKEN_FILE
from spaceport.exporter.converted_chat_formats import CHATGLM3, CHATML, own_template
from spaceport.exporter.sar_config import CheckpointError, read_json
from spaceport.exporter.sentencepiece_tokenizer import Pieces, read_pieces, sentencepiece_tokenizer
from spaceport.exporter.tiktoken_tokenizer import read_ranks, tiktoken_tokenizer

SENTENCEPIECE_FILE = "tokenizer.model"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_FAST_FILE = "tokenizer.json"  # not published; used if somebody added it

# ChatGLM3: tokens behind the last piece, in this order. sop and eop are in angle brackets, as GLM-4 has them: words
# such as "philosophy" contain the published names. Text cannot produce those that no prompt needs.
_CHATGLM_TOKENS = (
    *("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
_CHATGLM_UNUSED = ("[MASK]", "[sMASK]", "<eop>")
_CHATGLM_PREFIX = ("[gMASK]", "<sop>")
_LINE_BYTES = 256  # at most, of the first line of a file of ranks

_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205)))
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PublishedTokenizer:
    """The tokenizer of a published checkpoint."""

    tokenizer: Any  # of transformers
    end: tuple[int, ...]  # ids of the tokens that end an answer


def published_tokenizer(folder: Path, published_type: str, generation: Mapping[str, Any]) -> PublishedTokenizer:
    """The tokenizer of a published checkpoint folder of this model_type; raise if it cannot be converted exactly."""
    if published_type == "qwen":
        return _qwen(folder, generation)
    if published_type == "nemotron_labs_diffusion":
        return _nemotron(folder)
    return _chatglm(folder) if published_type == "chatglm" else _internlm(folder)


def _chatglm(folder: Path) -> PublishedTokenizer:
    _check_generation(folder)
    _check_vocabulary(folder)
    backend = _own_backend(folder)
    if backend is None:
        pieces = _pieces(folder)
        added = {text: len(pieces) + index for index, text in enumerate(_CHATGLM_TOKENS)}
        backend = sentencepiece_tokenizer(pieces, {**_named(pieces, "<unk>", "</s>"), **added}, _CHATGLM_UNUSED)
        _begin(backend, _CHATGLM_PREFIX)
    tokenizer = _wrapped(folder, backend, eos="</s>", unk="<unk>", pad="<unk>")
    # The published template has the published name of <sop>.
    tokenizer.chat_template = own_template(folder, tokenizer, CHATGLM3, {"[gMASK]sop": "[gMASK]<sop>"})
    return PublishedTokenizer(tokenizer, _ids(folder, backend, "</s>", "<|user|>", "<|observation|>"))


def _nemotron(folder: Path) -> PublishedTokenizer:
    """The tokenizer of a folder whose tokenizer.json needs no conversion, with the end token of its config.json."""
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises Exception itself
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be read: {reason}: expected tokenizer.json; copy or download it again"
        ) from error
    end = read_json(folder / "config.json").get("eos_token_id")
    return PublishedTokenizer(tokenizer, tuple(end) if isinstance(end, list) else () if end is None else (int(end),))


def _check_generation(folder: Path) -> None:
    """Raise for ChatGLM2: the same architecture, with another chat format and, for 32k positions, another embedding."""
    for name in (_TOKENIZER_CONFIG, "tokenization_chatglm.py"):
        file = folder / name
        if file.is_file() and any(
            token in file.read_text("utf-8", "replace") for token in ("<|user|>", "<|observation|>")
        ):
            return
    raise CheckpointError(
        f"{folder}: neither tokenization_chatglm.py nor {_TOKENIZER_CONFIG} names the token <|user|>: expected ChatGLM3, this "
        "may be ChatGLM2; copy these files of chatglm3-6b too (they are read as text and never run)"
    )


def _check_vocabulary(folder: Path) -> None:
    """Raise for GLM-4 with its own code: the same model_type, and ranks of tiktoken in the file of this name."""
    file = folder / SENTENCEPIECE_FILE
    if file.is_file():
        with file.open("rb") as stream:
            ranks = re.match(rb"[A-Za-z0-9+/=]+ \d+\r?\n", stream.read(_LINE_BYTES))
        if ranks:
            raise CheckpointError(
                f"{file}: has ranks of tiktoken, as in GLM-4: expected the SentencePiece model of ChatGLM3; use the GLM-4 release "
                "for transformers, such as glm-4-9b-chat-hf"
            )


def _internlm(folder: Path) -> PublishedTokenizer:
    config = _tokenizer_config(folder)
    if config.get("add_eos_token", False):
        raise CheckpointError(
            f"{folder / _TOKENIZER_CONFIG}: add_eos_token is true: expected false, prompts would end before the answer"
        )
    backend = _own_backend(folder)
    if backend is None:
        pieces = _pieces(folder)
        backend = sentencepiece_tokenizer(pieces, _named(pieces, "<unk>", "<s>", "</s>"))
        if config.get("add_bos_token", True):
            _begin(backend, ("<s>",))
    tokenizer = _wrapped(folder, backend, bos="<s>", eos="</s>", unk="<unk>", pad="</s>")
    tokenizer.chat_template = own_template(folder, tokenizer, None, {})
    # The chat models end an answer with <eoa>, a piece of every published InternLM v1 vocabulary.
    return PublishedTokenizer(
        tokenizer, _ids(folder, backend, "</s>", *(("<eoa>",) if backend.token_to_id("<eoa>") is not None else ()))
    )


def _qwen(folder: Path, generation: Mapping[str, Any]) -> PublishedTokenizer:
    backend = _own_backend(folder)
    if backend is None:
        file = folder / TIKTOKEN_FILE
        if not file.is_file():
            raise CheckpointError(
                f"{folder}: no {TIKTOKEN_FILE} in it: expected the vocabulary of Qwen v1; copy it there"
            )
        ranks = read_ranks(file)
        special = {text: len(ranks) + index for index, text in enumerate(_QWEN_TOKENS)}
        backend = tiktoken_tokenizer(ranks, _QWEN_PATTERN, special)
    tokenizer = _wrapped(folder, backend, eos="<|endoftext|>", pad="<|endoftext|>")
    chats = generation.get("chat_format", "raw")
    if chats not in ("raw", "chatml"):
        raise CheckpointError(
            f"{folder / 'generation_config.json'}: chat_format is {chats!r:.60}: expected raw (base model) or chatml (chat "
            "model); correct it"
        )
    tokenizer.chat_template = own_template(folder, tokenizer, CHATML if chats == "chatml" else None, {})
    ends = ("<|endoftext|>", "<|im_end|>", "<|im_start|>") if chats == "chatml" else ("<|endoftext|>",)
    return PublishedTokenizer(tokenizer, _ids(folder, backend, *ends))


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


def _wrapped(folder: Path, backend: Tokenizer, **special: str) -> Any:
    """The tokenizer of transformers with these special tokens."""
    _ids(folder, backend, *special.values())
    named = {f"{role}_token": text for role, text in special.items()}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)


def _ids(folder: Path, backend: Tokenizer, *texts: str) -> tuple[int, ...]:
    """The ids of tokens that a tokenizer must have."""
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


def _pieces(folder: Path) -> Pieces:
    file = folder / SENTENCEPIECE_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{folder}: no {SENTENCEPIECE_FILE} in it: expected the published SentencePiece model; copy it there"
        )
    return read_pieces(file)


def _named(pieces: Pieces, *texts: str) -> dict[str, int]:
    """The ids of these pieces."""
    found = {piece.piece: token for token, piece in enumerate(pieces.model.pieces) if piece.piece in texts}
    missing = [text for text in texts if text not in found]
    if missing:
        pieces.refuse(f"has no piece {missing[0]!r}", "the pieces of the published model")
    return found


def _begin(backend: Tokenizer, tokens: Sequence[str]) -> None:
    """Begin each text with these tokens."""
    before = " ".join(tokens)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{before} $A",
        pair=f"{before} $A $B",
        special_tokens=[(text, backend.token_to_id(text)) for text in tokens],
    )


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / _TOKENIZER_CONFIG
    return read_json(file) if file.exists() else {}
