"""Benchmark checkpoint: a Llama of a given size with random weights, as fast as a trained one."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from spaceport.exporter.checkpoint import SAR_FILE
from spaceport.exporter.checkpoint_source import quiet_libraries

# name -> hidden size, feed-forward size, layers, heads, KV heads
SHAPES = {
    "tiny": (64, 128, 2, 4, 2),
    "110m": (768, 2304, 12, 12, 4),
    "400m": (1024, 4096, 24, 16, 4),
    "1b": (2048, 5632, 22, 32, 8),
    "7b": (4096, 11008, 32, 32, 32),
}
VOCAB = 32000


def make_checkpoint(folder: Path, shape: str, mask_slots: int = 5, dtype: str = "float32") -> None:
    """Write a checkpoint with random weights, a byte-level tokenizer and one mask token."""
    hidden, inner, layers, heads, kv_heads = SHAPES[shape]
    quiet_libraries()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=256,
    )
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "[M]"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    settings = {"mask_tokens": ["[M]"], "mask_slots": mask_slots, "fork_token": None, "child_token": None}
    (folder / SAR_FILE).write_text(json.dumps(settings) + "\n", "utf-8")
