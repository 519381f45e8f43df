"""Scratch: the untrained checkpoint from which the demo model is trained, and its tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TOKENS = 1264  # including the four special tokens below; tuning adds its tokens after them
LONGEST_TEXT = 1024  # tokens

BOS, EOS, START, END = "<s>", "</s>", "<|start|>", "<|end|>"

_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(
    texts: Iterable[str],
    size: int = TOKENS,
    added: Sequence[str] = (),
    split: Sequence[pre_tokenizers.PreTokenizer] = (pre_tokenizers.Digits(individual_digits=True),),
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that starts every text with bos.

    `split` pre-tokenizes texts, by default into single digits. `added` are further special tokens.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[BOS, EOS, START, END, *added],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    bos = [(BOS, core.token_to_id(BOS))]
    opening = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=bos)
    core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), opening])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=[START, END, *added],
        chat_template=_TEMPLATE,
        model_max_length=LONGEST_TEXT,
        clean_up_tokenization_spaces=False,
    )


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
