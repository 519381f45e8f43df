"""Untrained: a byte-level tokenizer and a small Llama with random weights, as a checkpoint that `spaceport tune` opens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    size: int,
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


def write_untrained(
    folder: Path, tokenizer: PreTrainedTokenizerFast, *, rows: int, hidden: int, intermediate: int, layers: int
) -> None:
    """Write the checkpoint in float16 and its tokenizer; `rows` of the vocabulary include those for tokens of tuning."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=hidden // 6,
        max_position_embeddings=LONGEST_TEXT,
        initializer_range=0.05,  # at 0.02 a model this narrow learns late
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=eos,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for layer in model.model.layers:  # output projections are scaled down with depth, as in GPT-2
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                cast("torch.nn.Linear", projection).weight /= math.sqrt(2 * layers)
    ends = [eos, tokenizer.convert_tokens_to_ids(END)]
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=ends, pad_token_id=eos)
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
