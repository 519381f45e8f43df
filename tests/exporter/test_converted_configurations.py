"""Converted configurations: published ones give the published weights; what cannot be converted exactly is refused.

The sizes are `total_size` of the index files that were published with the weights, except for Qwen-14B: this one is the
number of parameters that llama.cpp reports for Qwen1.5-14B, which has the same sizes.
"""

from __future__ import annotations

import json
import re
from math import prod
from typing import Any

import pytest
import torch

from spaceport.exporter.converted_checkpoint import published_tensors
from spaceport.exporter.converted_families import FAMILIES
from spaceport.graphs.contract.faults import CheckpointError
from support.paths import TESTS
from support.published_checkpoints import WITHOUT, converted, fields_of

RELEASES: dict[str, Any] = json.loads((TESTS / "data" / "published_sizes.json").read_text("utf-8"))["converted"]
NO_NUMBERS = (0, -1.0, True, "7", float("inf"), float("nan"))
# Of each family: changes of its configuration, and a part of the message.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "chatglm": [
        ({"quantization_bit": 4}, "quantization_bit is 4, so its weights are quantized: expected the published"),
        ({"position_encoding_2d": True}, "a configuration of the first ChatGLM-6B (two-dimensional positions):"),
        ({"multi_query_group_num": 3}, "num_attention_heads is 4: expected a multiple of multi_query_group_num 3"),
        ({"kv_channels": 6}, "kv_channels is 6: expected a multiple of 4, because half of them rotate in pairs"),
        (
            {"num_layers": WITHOUT},
            "num_layers is missing: expected a whole number of at least 1 in a ChatGLM3 configuration",
        ),
        *(({"num_layers": value}, f"num_layers is {value!r}: expected a whole") for value in (0, -1, 1.5, True, "7")),
        *(({"rope_ratio": value}, f"rope_ratio is {value!r}: expected a number above 0") for value in NO_NUMBERS),
        ({"window": 7}, "unknown field 'window' (7): expected the fields of the published ChatGLM3 configuration;"),
    ],
    "internlm": [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2: expected 4, the number of query heads, in an InternLM"),
        ({"hidden_size": 36}, "hidden_size is 36: expected 4 heads of an even number of dimensions"),
        ({"rotary": {"base": 10000, "type": "yarn"}}, "rotary is {'base': 10000, 'type': 'yarn'}: expected an object"),
        ({"rotary": {"base": 10000, "type": "origin", "extra": 1}}, "rotary is {'base': 10000, 'type': 'origin',"),
        ({"rotary": {"base": -1, "type": "origin"}}, "rotary.base is -1: expected a number above 0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}, so its weights are quantized"),
    ],
    "qwen": [
        ({"n_embd": 4096}, "fields of Qwen's first release (n_embd, n_layer): expected hidden_size and"),
        ({"kv_channels": 16}, "kv_channels is 16 with 4 heads: expected an even number, and hidden_size 32 divided by"),
        ({"intermediate_size": 49}, "intermediate_size is 49: expected an even number: the gate and the other half"),
        ({"rope_theta": 5}, "rope_theta is 5: expected rotary_emb_base, 10000; correct the one that is wrong"),
        ({"use_dynamic_ntk": "auto"}, "use_dynamic_ntk is 'auto': expected true or false"),
    ],
}


@pytest.mark.parametrize("family", REFUSED)
def test_each_flag_with_another_value_is_refused(family: str) -> None:
    for name, rule in FAMILIES[family].fixed.items():
        converted(family, {name: rule.value})
        nearly = {"True": 1, "False": 0, "1.0": True}.get(str(rule.value), "else")
        for wrong in ("else", nearly):
            with pytest.raises(CheckpointError, match=f"{name} is {wrong!r}, so the model has .*: expected"):
                converted(family, {name: wrong})


@pytest.mark.parametrize(
    ("family", "changes", "message"), [(family, *row) for family, rows in REFUSED.items() for row in rows]
)
def test_a_configuration_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: .*" + re.escape(message)):
        converted(family, changes)


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({"seq_length": 64}, 64),
        ({"seq_length": 64, "use_dynamic_ntk": False}, 64),
        ({"seq_length": 64, "use_logn_attn": False}, 64),
        ({"seq_length": 64, "use_logn_attn": False, "use_dynamic_ntk": False}, 512),
        ({"seq_length": 1024}, 512),
    ],
)
def test_qwen_ends_where_its_attention_changes(changes: dict[str, Any], positions: int) -> None:
    assert converted("qwen", changes).max_position_embeddings == positions


@pytest.mark.parametrize(
    ("family", "changes", "dtype"),
    [
        ("chatglm", {}, "float16"),
        ("internlm", {"torch_dtype": WITHOUT}, None),
        ("qwen", {}, "bfloat16"),
        ("qwen", {"bf16": False}, None),
        ("qwen", {"bf16": False, "params_dtype": "torch.bfloat16"}, "bfloat16"),
    ],
)
def test_the_type_of_the_published_weights_is_known(family: str, changes: dict[str, Any], dtype: str | None) -> None:
    assert fields_of(family, changes).dtype() == dtype


@pytest.mark.parametrize("name", RELEASES)
def test_a_published_checkpoint_has_exactly_the_weights_of_the_converted_model(name: str) -> None:
    kind, sizes, size, computed, positions = RELEASES[name].values()
    family, config = FAMILIES[kind], converted(kind, sizes)
    tensors = published_tensors(family, config)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert 2 * sum(prod(tensor.shape) for tensor in tensors) + computed == size  # in 16-bit types
    assert config.max_position_embeddings == positions
    shapes = [item for tensor in tensors for item in tensor.weights.items()]
    with torch.device("meta"):
        model = family.model(config)
    assert sorted(shapes) == sorted((name, tuple(tensor.shape)) for name, tensor in model.state_dict().items())
