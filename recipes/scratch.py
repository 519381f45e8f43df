"""Scratch: the untrained checkpoint from which the demo model is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.tokenizer import END, LONGEST_TEXT, TOKENS

FREE_ROWS = 16  # minimum unused vocabulary rows
SPREAD = 0.05  # standard deviation of the weights; at 0.02 a model this narrow learns late


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a model."""

    tokens: int  # vocabulary size of the tokenizer
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    positions: int
    free_rows: int = FREE_ROWS  # minimum unused vocabulary rows, for tokens added by tuning


DEMO = ModelShape(TOKENS, 192, 448, 5, 6, 2, LONGEST_TEXT)  # 2.0 million weights
CODE = ModelShape(4096, 512, 1408, 8, 8, 2, 2048)  # 24.8 million


def write_scratch(
    folder: Path, tokenizer: PreTrainedTokenizerFast, shape: ModelShape = DEMO, seed: int = 0
) -> LlamaForCausalLM:
    """Write the checkpoint and its tokenizer in float16; return the model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _new_model(tokenizer, shape)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    ends = [eos, tokenizer.convert_tokens_to_ids(END)]
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=ends, pad_token_id=eos)
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def _new_model(tokenizer: PreTrainedTokenizerFast, shape: ModelShape) -> LlamaForCausalLM:
    """A model with random weights; output projections are scaled down with depth, as in GPT-2."""
    config = LlamaConfig(
        vocab_size=64 * math.ceil((len(tokenizer) + shape.free_rows) / 64),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=shape.positions,
        initializer_range=SPREAD,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                cast("torch.nn.Linear", projection).weight /= math.sqrt(2 * shape.layers)
    return model
