"""Published sizes: configurations of published checkpoints, converted on the meta device, with their numbers of weights.

The totals are `total_size` of the index files that were published with the weights, except for Qwen-14B: this one is the
number of parameters that llama.cpp reports for Qwen1.5-14B, which has the same sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from spaceport.exporter.converted_checkpoint import FAMILIES
from spaceport.exporter.converted_fields import Fields
from support.published_checkpoints import CONFIGS
from support.published_sizes import CHATGLM3, QWEN_14B


@dataclass(frozen=True)
class Release:
    """A published checkpoint: what its configuration has besides flags, and the size of its weights."""

    name: str
    family: str
    sizes: dict[str, Any]
    total: int  # bytes of all tensors in 16-bit types
    positions: int  # of the converted model
    computed: int = 0  # bytes of tensors that are computed from the configuration


INTERNLM_20B = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "num_hidden_layers": 60,
    "vocab_size": 103168,
    "max_position_embeddings": 4096,
    "bias": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "pretraining_tp": 1,
}
QWEN_72B = {
    "hidden_size": 8192,
    "intermediate_size": 49152,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "kv_channels": 128,
    "vocab_size": 152064,
    "seq_length": 8192,
    "max_position_embeddings": 8192,
    "rotary_emb_base": 1000000,
    "rope_theta": 1000000,
    "use_dynamic_ntk": False,
    "use_logn_attn": False,
}
RELEASES = (
    Release("chatglm3-6b", "chatglm", {**CHATGLM3, "seq_length": 8192}, 12487168064, 8192, computed=64),
    Release(
        "chatglm3-6b-32k",
        "chatglm",
        {**CHATGLM3, "seq_length": 32768, "rope_ratio": 50},
        12487168064,
        32768,
        computed=64,
    ),
    Release("internlm-20b", "internlm", INTERNLM_20B, 40177428480, 4096),
    Release("Qwen-14B", "qwen", QWEN_14B, 2 * 14167290880, 2048),
    Release("Qwen-72B", "qwen", QWEN_72B, 144575840256, 8192),
)


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_a_published_checkpoint_has_exactly_the_weights_of_the_converted_model(release: Release) -> None:
    family = FAMILIES[release.family]
    config = family.config(Fields(Path("config.json"), {**CONFIGS[release.family], **release.sizes}, family.title))
    layout = list(family.layout(config))
    assert len({source.name for source in layout}) == len(layout)
    assert 2 * sum(prod(source.shape) for source in layout) + release.computed == release.total
    assert config.max_position_embeddings == release.positions
    rows = [
        (weight, (rows.stop - rows.start, *source.shape[1:])) for source in layout for weight, rows in source.slices()
    ]
    with torch.device("meta"):
        model = family.model(config)
    assert sorted(rows) == sorted((name, tuple(tensor.shape)) for name, tensor in model.state_dict().items())
