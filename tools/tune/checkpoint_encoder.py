"""Checkpoint encoder: the conversation encoder of a checkpoint, read without its weights."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.tools.tune.conversation_encoder import ConversationEncoder, conversation_encoder


def checkpoint_encoder(folder: Path, remote_code: bool) -> ConversationEncoder:
    """Conversation encoder of a checkpoint folder."""
    checkpoint = open_checkpoint(folder, TokenFlags(), remote_code)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(checkpoint.tokenizer),
        chat_template=checkpoint.template,
        **checkpoint.special_tokens,
    )
    return conversation_encoder(tokenizer, checkpoint.tokens)
