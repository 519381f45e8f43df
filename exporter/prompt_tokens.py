"""Prompt tokens: prompts in a checkpoint's tokens, for texts to calibrate with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import AutoTokenizer

from spaceport.exporter.checkpoint import Checkpoint
from spaceport.graphs.contract.faults import InputFault

Prompt = str | Sequence[Mapping[str, str]]  # a text, or the messages of a chat

DEFAULT_QUESTIONS = ("Hello!", "Write a short story.", "Explain how rain forms.")
MAX_PROMPT_TOKENS = 512  # of a prompt; of a longer one the last


def prompt_tokens(checkpoint: Checkpoint, prompts: Sequence[Prompt]) -> tuple[Tensor, ...]:
    """Each prompt as 1 x tokens; messages go through the checkpoint's chat template. Without prompts, those of a few chats if
    the checkpoint has a template."""
    if not prompts:
        prompts = (
            [] if checkpoint.template is None else [[{"role": "user", "content": asked}] for asked in DEFAULT_QUESTIONS]
        )
    if not prompts:
        return ()
    tokenizer = AutoTokenizer.from_pretrained(
        checkpoint.folder, local_files_only=True, trust_remote_code=checkpoint.remote_code
    )
    found = []
    for number, prompt in enumerate(prompts, 1):
        if not isinstance(prompt, str) and checkpoint.template is None:
            raise InputFault(
                f"calibration prompt {number} is a chat, {checkpoint.folder} has no chat template: expected a text"
            )
        text = (
            prompt
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(
                [dict(one) for one in prompt], tokenize=False, add_generation_prompt=True
            )
        )
        ids = tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"][-MAX_PROMPT_TOKENS:]
        if not ids:
            raise InputFault(f"calibration prompt {number} has no tokens: expected a text")
        found.append(torch.tensor([ids]))
    return tuple(found)
