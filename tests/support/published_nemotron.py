"""Published Nemotron: tiny checkpoints with linear_spec_lora in the published layout, and their logits in float64."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from support.paths import TINY
from support.published import MASK, PADDED, TOKENIZER

HIDDEN, INNER, HEADS, GROUPS, SIZE, LAYERS = 32, 48, 4, 2, 16, 2
RANK, ALPHA = 4, 16
FOLDER = "linear_spec_lora"
# As published, apart from the sizes.
CONFIG: dict[str, Any] = json.loads("""{
    "architectures": ["NemotronLabsDiffusionModel"], "model_type": "nemotron_labs_diffusion", "hidden_act": "silu",
    "auto_map": {"AutoConfig": "configuration_nemotron_labs_diffusion.NemotronLabsDiffusionConfig"},
    "ar_loss_weight": 1.0, "dlm_loss_weight": null, "dlm_paradigm": "bidirectional", "dp_varying_mask_ratio": false,
    "attention_bias": false, "attention_dropout": 0.0, "attn_implementation": "sdpa", "mlp_bias": false, "block_size": 6,
    "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.02, "max_position_embeddings": 256, "use_cache": false,
    "rms_norm_eps": 1e-05, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "float32",
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1
    },
    "transformers_version": "5.0.0"
}""") | {
    "head_dim": SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "mask_token_id": MASK,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": GROUPS,
    "vocab_size": PADDED,
}
# The token that the constant model generates, and the one that its mask rows read without adapter.
CONSTANT, WRONG = 40, 41

Weights = dict[str, Tensor]


def random_weights() -> tuple[Weights, Weights]:
    """Weights of the base model and of its adapter, so large that every token of the context changes the logits."""
    dice = torch.Generator().manual_seed(11)
    shapes = {"encoder.embed_tokens": (PADDED, HIDDEN), "diffusion_head": (PADDED, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"encoder.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj": (GROUPS * SIZE, HIDDEN) for name in "kv"}
        shapes |= {f"{prefix}.self_attn.q_proj": (HEADS * SIZE, HIDDEN)}
        shapes |= {f"{prefix}.self_attn.o_proj": (HIDDEN, HEADS * SIZE)}
        shapes |= {f"{prefix}.mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj": (HIDDEN, INNER)}
    base = {f"{name}.weight": 0.3 * torch.randn(shape, generator=dice) for name, shape in shapes.items()}
    norms = ["encoder.norm", *(f"encoder.layers.{layer}.{kind}" for layer in range(LAYERS) for kind in _NORMS)]
    base |= {f"{name}.weight": 1 + 0.2 * torch.randn(HIDDEN, generator=dice) for name in norms}
    adapter = {}
    for layer in range(LAYERS):
        adapter[_half(layer, "A")] = 0.3 * torch.randn(RANK, HEADS * SIZE, generator=dice)
        adapter[_half(layer, "B")] = 0.3 * torch.randn(HIDDEN, RANK, generator=dice)
    return base, adapter


def constant_weights() -> tuple[Weights, Weights]:
    """A model that generates one token for ever; its mask rows predict another one unless the adapter acts on them."""
    base, adapter = ({name: torch.zeros_like(tensor) for name, tensor in part.items()} for part in random_weights())
    for name, tensor in base.items():
        if "norm" in name:
            tensor.fill_(1.0)
    base["encoder.embed_tokens.weight"][:, 0] = 1.0
    base["encoder.embed_tokens.weight"][MASK, :2] = torch.tensor([0.0, 1.0])
    base["diffusion_head.weight"][CONSTANT, 0] = base["diffusion_head.weight"][WRONG, 1] = 1.0
    base["encoder.layers.0.self_attn.v_proj.weight"][0, 0] = 1.0  # what a row sees of tokens that are no mask tokens
    adapter[_half(0, "A")][0, 0] = 1.0
    adapter[_half(0, "B")][0, 0] = 1.0  # times alpha / rank, which is 4
    return base, adapter


def write_nemotron(folder: Path, base: Weights, adapter: Weights | None, **entries: Any) -> Path:
    """A checkpoint folder with the tiny tokenizer, and the adapter in its folder."""
    folder.mkdir(parents=True)
    for name in TOKENIZER:
        shutil.copyfile(TINY / name, folder / name)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **entries}), "utf-8")
    save_file(base, folder / "model.safetensors")
    if adapter is not None:
        inside = folder / FOLDER
        inside.mkdir()
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["o_proj"], "bias": "none"}
        (inside / "adapter_config.json").write_text(json.dumps(config), "utf-8")
        save_file(adapter, inside / "adapter_model.safetensors")
    return folder


def nemotron_logits(base: Weights, adapter: Weights, ids: list[int], visible: Tensor) -> Tensor:
    """Logits (T x V) for rows at positions 0, 1, ... with this visibility (T x T); the adapter acts on mask rows."""
    weights, low = ({name: tensor.double() for name, tensor in part.items()} for part in (base, adapter))
    masked = (torch.tensor(ids) == MASK)[:, None].double()
    positions = torch.arange(len(ids)).double()
    hidden = weights["encoder.embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        prefix = f"encoder.layers.{layer}"

        def linear(name: str, rows: Tensor, prefix: str = prefix) -> Tensor:
            return rows @ weights[f"{prefix}.{name}.weight"].T

        rows = _norm(hidden, weights[f"{prefix}.input_layernorm.weight"])
        query, key, value = (
            linear(f"self_attn.{name}_proj", rows).view(len(ids), -1, SIZE).transpose(0, 1) for name in "qkv"
        )
        query, key = _rotated(query, positions), _rotated(key, positions)
        scaling = CONFIG["rope_parameters"]
        blocks = torch.floor(positions / scaling["original_max_position_embeddings"])
        query = query * (1 + scaling["llama_4_scaling_beta"] * torch.log1p(blocks))[None, :, None]
        key, value = (each.repeat_interleave(HEADS // GROUPS, dim=0) for each in (key, value))
        scores = (query @ key.transpose(1, 2) / math.sqrt(SIZE)).masked_fill(~visible, -math.inf)
        attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(ids), -1)
        drafted = attended @ low[_half(layer, "A")].T @ low[_half(layer, "B")].T * (ALPHA / RANK)
        hidden = hidden + linear("self_attn.o_proj", attended) + masked * drafted
        rows = _norm(hidden, weights[f"{prefix}.post_attention_layernorm.weight"])
        gated = torch.nn.functional.silu(linear("mlp.gate_proj", rows)) * linear("mlp.up_proj", rows)
        hidden = hidden + linear("mlp.down_proj", gated)
    found: Tensor = _norm(hidden, weights["encoder.norm.weight"]) @ weights["diffusion_head.weight"].T
    return found


_NORMS = ("input_layernorm", "post_attention_layernorm")


def _half(layer: int, half: str) -> str:
    return f"base_model.model.encoder.layers.{layer}.self_attn.o_proj.lora_{half}.weight"


def _norm(rows: Tensor, weight: Tensor) -> Tensor:
    return rows / (rows.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt() * weight


def _rotated(rows: Tensor, positions: Tensor) -> Tensor:
    """Rows (heads x T x size) with the YaRN embedding: slow dimensions are interpolated, fast ones are not."""
    rope, half = CONFIG["rope_parameters"], SIZE // 2
    base, original = rope["rope_theta"], rope["original_max_position_embeddings"]
    fast, slow = (
        SIZE * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (rope["beta_fast"], rope["beta_slow"])
    )
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), SIZE - 1)
    plain = base ** -(torch.arange(half).double() * 2 / SIZE)
    share = ((torch.arange(half).double() - low) / (high - low or 0.001)).clamp(0, 1)
    angles = positions[:, None] * (plain * (1 - share) + plain / rope["factor"] * share)[None]
    cos, sin = (torch.cat((each, each), dim=-1) for each in (angles.cos(), angles.sin()))
    turned = torch.cat((-rows[..., half:], rows[..., :half]), dim=-1)
    return rows * cos + turned * sin
