"""Spelling of a checkpoint: its tokenizer, template and special tokens, read without its weights."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.tools.tune.spelling import ConversationSpelling, spelling_of


def checkpoint_spelling(folder: Path, remote_code: bool) -> ConversationSpelling:
    """How conversations are written in the tokens of a checkpoint."""
    checkpoint = open_checkpoint(folder, TokenFlags(), remote_code)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(checkpoint.tokenizer),
        chat_template=checkpoint.template,
        **checkpoint.special_tokens,
    )
    return spelling_of(tokenizer, checkpoint.tokens)
