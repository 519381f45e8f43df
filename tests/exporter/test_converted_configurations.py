"""Converted configurations: published ones give the published weights; what cannot be converted exactly is refused.

The sizes are `total_size` of the index files that were published with the weights, except for Qwen-14B: this one is the
number of parameters that llama.cpp reports for Qwen1.5-14B, which has the same sizes.
"""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from spaceport.exporter.converted_checkpoint import PublishedTensor, Shape, check_tensors, published_tensors
from spaceport.exporter.converted_families import FAMILIES, Fields, Fixed
from spaceport.exporter.sar_config import CheckpointError
from support.paths import TESTS
from support.published_checkpoints import WITHOUT, converted, fields_of

FILE = Path("config.json")
RELEASES: dict[str, Any] = json.loads((TESTS / "data" / "published_sizes.json").read_text("utf-8"))["converted"]
# Of each family: changes of its configuration, and a part of the message.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "chatglm": [
        ({"multi_query_attention": False}, "multi_query_attention is False, so the model has one key and value head"),
        ({"quantization_bit": 4}, "quantization_bit is 4, so its weights are quantized: expected the published"),
        ({"position_encoding_2d": True}, "a configuration of the first ChatGLM-6B (two-dimensional positions):"),
        ({"inner_hidden_size": 16384}, "a configuration of the first ChatGLM-6B"),
        ({"multi_query_group_num": 3}, "num_attention_heads is 4: expected a multiple of multi_query_group_num 3"),
        ({"kv_channels": 6}, "kv_channels is 6: expected a multiple of 4, because half of them rotate in pairs"),
        ({"num_layers": 0}, "num_layers is 0: expected a whole number of at least 1 in a ChatGLM3 configuration; copy"),
        ({"layernorm_epsilon": "1e-5"}, "layernorm_epsilon is '1e-5': expected a number above 0"),
        ({"rope_ratio": 0}, "rope_ratio is 0: expected a number above 0"),
        ({"window": 7}, "unknown field 'window' (7): expected the fields of the published ChatGLM3 configuration;"),
    ],
    "internlm": [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', so the model has another activation: expected 'silu'"),
        ({"rope_scaling": {"type": "linear"}}, "a rotary scaling that the original code ignores"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2: expected 4, the number of query heads, in an InternLM"),
        ({"hidden_size": 36}, "hidden_size is 36: expected 4 heads of an even number of dimensions"),
        ({"rotary": {"base": 10000, "type": "yarn"}}, "rotary is {'base': 10000, 'type': 'yarn'}: expected an object"),
        ({"rotary": {"base": 10000, "type": "origin", "extra": 1}}, "rotary is {'base': 10000, 'type': 'origin',"),
        ({"rotary": 5}, "rotary is 5: expected an object with base, type (origin or dynamic)"),
        ({"rotary": {"base": -1, "type": "origin"}}, "rotary.base is -1: expected a number above 0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}, so its weights are quantized"),
        ({"qkv_bias": True}, "unknown field 'qkv_bias' (True)"),
    ],
    "qwen": [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is {'quant_method': 'gptq'}, so its"),
        ({"n_embd": 4096}, "fields of Qwen's first release (n_embd, n_layer): expected hidden_size and"),
        ({"kv_channels": 16}, "kv_channels is 16 with 4 heads: expected an even number, and hidden_size 32 divided by"),
        ({"intermediate_size": 49}, "intermediate_size is 49: expected an even number: the gate and the other half"),
        ({"rope_theta": 5}, "rope_theta is 5: expected rotary_emb_base, 10000; correct the one that is wrong"),
        ({"use_dynamic_ntk": "auto"}, "use_dynamic_ntk is 'auto': expected true or false"),
        ({"sliding_window": 7}, "unknown field 'sliding_window' (7)"),
    ],
}


@pytest.mark.parametrize("family", REFUSED)
def test_each_flag_with_another_value_is_refused(family: str) -> None:
    for name, rule in FAMILIES[family].fixed.items():
        converted(family, {name: rule.value})
        with pytest.raises(CheckpointError, match=f"{name} is 'else', so the model has .*: expected"):
            converted(family, {name: "else"})


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


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "7", None])
def test_a_size_is_a_whole_number(value: Any) -> None:
    assert Fields(FILE, {"size": 7}, "X").whole("size") == 7
    with pytest.raises(CheckpointError, match=r"size (is|is missing).*: expected a whole number of at least 1 in a X"):
        Fields(FILE, {"size": value}, "X").whole("size")


@pytest.mark.parametrize("value", [0, -1.0, True, "7", float("inf"), float("nan"), None])
def test_a_number_is_above_0(value: Any) -> None:
    assert Fields(FILE, {"base": 1e-5}, "X").number("base") == 1e-5
    with pytest.raises(CheckpointError, match=r"base (is|is missing).*: expected a number above 0 in a X"):
        Fields(FILE, {"base": value}, "X").number("base")


@pytest.mark.parametrize(("value", "wanted"), [(1, True), (0, False), (None, True), (True, 1.0)])
def test_a_flag_that_is_nearly_right_is_refused(value: Any, wanted: Any) -> None:
    rules = {"flag": Fixed(wanted, wanted, "something else")}
    Fields(FILE, {}, "X").check(rules, ())
    Fields(FILE, {"flag": wanted}, "X").check(rules, ())
    with pytest.raises(CheckpointError, match=re.escape(f"flag is {value}, so the model has something else")):
        Fields(FILE, {"flag": value}, "X").check(rules, ())


def test_each_tensor_is_used_once_or_named() -> None:
    """Names and shapes of one folder are wrong in the tests of converted checkpoints."""
    fused = PublishedTensor("old.qkv.weight", {"q": (6, 8), "k": (2, 8), "v": (2, 8)})
    head = PublishedTensor("lm_head.weight", {"head": (10, 8)}, "old.qkv.weight")
    assert list(fused.slices()) == [("q", slice(0, 6)), ("k", slice(6, 8)), ("v", slice(8, 10))]
    assert (fused.shape, head.shape, list(head.slices())) == ((10, 8), (10, 8), [])
    found: dict[str, Shape] = {"old.qkv.weight": (10, 8)}
    tables = ("transformer.rotary_pos_emb.inv_freq", "model.layers.3.self_attn.rotary_emb.inv_freq")
    computed: dict[str, Shape] = dict.fromkeys((*tables, "transformer.h.11.attn.logn_tensor"), (32,))
    for accepted in ({}, {"lm_head.weight": (10, 8)}, computed):
        check_tensors("folder", [fused, head], {**found, **accepted})
    for other, message in (
        ({}, "tensor old.qkv.weight is missing: expected the 2 tensors that config.json"),
        ({**found, "z": (1,), "y": (1,)}, "tensor y and 1 more are unknown: expected the 2 tensors"),
        ({**found, "transformer.h.0.attn.bias": (1,)}, "tensor transformer.h.0.attn.bias is unknown"),
        ({**found, "lm_head.weight": (9, 8)}, "tensor lm_head.weight has shape (9, 8): expected (10, 8) from"),
    ):
        with pytest.raises(CheckpointError, match="^folder: " + re.escape(message)):
            check_tensors("folder", [fused, head], other)


@pytest.mark.parametrize("name", RELEASES)
def test_a_published_checkpoint_has_exactly_the_weights_of_the_converted_model(name: str) -> None:
    kind, sizes, size, computed, positions = RELEASES[name].values()
    family, config = FAMILIES[kind], converted(kind, sizes)
    tensors = published_tensors(family, config)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert 2 * sum(prod(tensor.shape) for tensor in tensors) + computed == size  # in 16-bit types
    assert config.max_position_embeddings == positions
    rows = [
        (weight, (rows.stop - rows.start, *tensor.shape[1:])) for tensor in tensors for weight, rows in tensor.slices()
    ]
    with torch.device("meta"):
        model = family.model(config)
    assert sorted(rows) == sorted((name, tuple(tensor.shape)) for name, tensor in model.state_dict().items())
