"""Scratch: an untrained checkpoint of about two million weights, which the training of the demo model starts from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spaceport.tools.demo.corpus import Corpus
from spaceport.tools.demo.tokenizer import END, LONGEST_TEXT, train_tokenizer

LAYERS = 5
FREE_ROWS = 16  # of the vocabulary, at the least: for the tokens that a tuning adds
SPREAD = 0.05  # standard deviation of the weights: of 0.02 a model so narrow learns late


def write_scratch(folder: Path, corpus: Corpus, seed: int = 0) -> LlamaForCausalLM:
    """Writes the checkpoint, its tokenizer trained on the corpus, in float32 and returns the model."""
    tokenizer = train_tokenizer(corpus.vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _new_model(tokenizer)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    ends = [eos, tokenizer.convert_tokens_to_ids(END)]
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=ends, pad_token_id=eos)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def _new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Random weights; what layers add to the residual stream starts small, so that depth does not drown the token."""
    config = LlamaConfig(
        vocab_size=64 * math.ceil((len(tokenizer) + FREE_ROWS) / 64),
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LONGEST_TEXT,
        initializer_range=SPREAD,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for added in (layer.self_attn.o_proj, layer.mlp.down_proj):
                cast("torch.nn.Linear", added).weight /= math.sqrt(2 * LAYERS)
    return model
