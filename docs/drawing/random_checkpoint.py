"""Random checkpoint: write a llama checkpoint with random weights, one shard per layer, to measure large exports.

python docs/drawing/random_checkpoint.py FOLDER --tokenizer CHECKPOINT [--layers 32 --hidden 4096 --inner 11008]
The defaults are the sizes of LLaMA-2-7B: 13.5 GB in bfloat16. At most one layer is in memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "sar_config.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="checkpoint whose tokenizer is copied")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=11008)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=32000)
    given = parser.parse_args()
    config = LlamaConfig(
        hidden_size=given.hidden,
        intermediate_size=given.inner,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.kv_heads,
        vocab_size=given.vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    given.folder.mkdir(parents=True, exist_ok=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(given.folder)
    for name in _TOKENIZER_FILES:
        if (given.tokenizer / name).is_file():
            shutil.copy(given.tokenizer / name, given.folder / name)
    write_shards(given.folder, config)


def write_shards(folder: Path, config: LlamaConfig) -> None:
    """Write the tensors of each layer, and those outside of the layers, into one file each, and their index."""
    torch.manual_seed(0)
    index: dict[str, str] = {}
    total = 0
    for number in range(config.num_hidden_layers + 1):
        file = f"model-{number + 1:05d}-of-{config.num_hidden_layers + 1:05d}.safetensors"
        tensors = _outer(config) if number == config.num_hidden_layers else _layer(config, number)
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=1), "utf-8")


def _layer(config: LlamaConfig, number: int) -> dict[str, Tensor]:
    hidden, inner = config.hidden_size, config.intermediate_size
    kv_size = hidden // config.num_attention_heads * config.num_key_value_heads
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found = {f"model.layers.{number}.{name}.weight": _matrix(*shape) for name, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        found[f"model.layers.{number}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return found


def _outer(config: LlamaConfig) -> dict[str, Tensor]:
    return {
        "model.embed_tokens.weight": _matrix(config.vocab_size, config.hidden_size),
        "model.norm.weight": torch.ones(config.hidden_size, dtype=torch.bfloat16),
        "lm_head.weight": _matrix(config.vocab_size, config.hidden_size),
    }


def _matrix(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(std=0.02)


if __name__ == "__main__":
    main()
