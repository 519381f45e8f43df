"""Prompt tokens: tokenized prompts for calibration, and the tokens that its texts must not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from spaceport.exporter.adapter_folder import embedding_rows
from spaceport.exporter.checkpoint import Checkpoint, load_tokenizer
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.gated import MaskAdapter

Prompt = str | Sequence[Mapping[str, str]]  # text, or chat messages

DEFAULT_QUESTIONS = ("Hello!", "Write a short story.", "Explain how rain forms.")
MAX_PROMPT_TOKENS = 512  # of a longer prompt, the last tokens are used


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
