"""InternLM v1: configurations that cannot be converted exactly are refused before weights are read."""

from __future__ import annotations

from typing import Any

import pytest

from support.converted_configurations import assert_refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', so the model has another activation: expected 'silu'"),
        ({"rope_scaling": {"type": "linear"}}, "a rotary scaling that the original code ignores"),
        (
            {"num_key_value_heads": 2},
            "num_key_value_heads is 2: expected 4, the number of query heads, in an InternLM v1",
        ),
        ({"hidden_size": 36}, "hidden_size is 36: expected 4 heads of an even number of dimensions"),
        (
            {"rotary": {"base": 10000, "type": "yarn"}},
            "rotary is {'base': 10000, 'type': 'yarn'}: expected an object with",
        ),
        (
            {"rotary": {"base": 10000, "type": "origin", "extra": 1}},
            "rotary is {'base': 10000, 'type': 'origin', 'extra'",
        ),
        ({"rotary": 5}, "rotary is 5: expected an object with base, type (origin or dynamic)"),
        ({"rotary": {"base": -1, "type": "origin"}}, "rotary.base is -1: expected a number above 0"),
        ({"bias": "yes"}, "bias is 'yes': expected true or false"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}, so its weights are quantized"),
        ({"qkv_bias": True}, "unknown field 'qkv_bias' (True)"),
    ],
)
def test_an_internlm_configuration_is_refused(changes: dict[str, Any], message: str) -> None:
    assert_refused("internlm", changes, message)
