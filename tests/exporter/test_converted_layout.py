"""Layout: every published tensor is used exactly once, or named in an error."""

from __future__ import annotations

import re

import pytest

from spaceport.exporter.converted_layout import Shape, check_tensors, matrix, tied, vector
from spaceport.exporter.sar_config import CheckpointError

FUSED = matrix("old.qkv.weight", 8, ("q", 6), ("k", 2), ("v", 2))
BIAS = vector("old.qkv.bias", ("qb", 6), ("kb", 4))
TIED = tied(matrix("lm_head.weight", 8, ("head", 10)), "old.qkv.weight")
FOUND: dict[str, Shape] = {"old.qkv.weight": (10, 8), "old.qkv.bias": (10,)}


def test_the_rows_of_a_tensor_follow_each_other() -> None:
    assert list(FUSED.slices()) == [("q", slice(0, 6)), ("k", slice(6, 8)), ("v", slice(8, 10))]
    assert (FUSED.shape, BIAS.shape, TIED.shape) == ((10, 8), (10,), (10, 8))
    assert list(TIED.slices()) == []


def test_a_tied_head_and_computed_tables_may_be_there_or_not() -> None:
    check_tensors("folder", [FUSED, BIAS, TIED], FOUND)
    tables: dict[str, Shape] = {
        "transformer.rotary_pos_emb.inv_freq": (32,),
        "model.layers.3.self_attn.rotary_emb.inv_freq": (64,),
        "transformer.h.0.attn.masked_bias": (),
        "transformer.h.11.attn.logn_tensor": (1, 9, 1, 1),
    }
    check_tensors("folder", [FUSED, BIAS, TIED], {**FOUND, **tables, "lm_head.weight": (10, 8)})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            {"old.qkv.weight": (10, 8)},
            "folder: tensor old.qkv.bias is missing: expected the 3 tensors that config.json",
        ),
        ({}, "folder: tensor old.qkv.weight and 1 more are missing: expected the 3 tensors"),
        ({**FOUND, "lora.weight": (1,)}, "folder: tensor lora.weight is unknown: expected the 3 tensors"),
        ({**FOUND, "z": (1,), "y": (1,)}, "folder: tensor y and 1 more are unknown"),
        ({**FOUND, "transformer.h.0.attn.bias": (1,)}, "folder: tensor transformer.h.0.attn.bias is unknown"),
        (
            {**FOUND, "old.qkv.bias": (9,)},
            "folder: tensor old.qkv.bias has shape (9,): expected (10,) from config.json",
        ),
        ({**FOUND, "old.qkv.weight": (8, 10)}, "folder: tensor old.qkv.weight has shape (8, 10): expected (10, 8)"),
        ({**FOUND, "lm_head.weight": (9, 8)}, "folder: tensor lm_head.weight has shape (9, 8): expected (10, 8)"),
    ],
)
def test_other_tensors_are_refused_by_name(found: dict[str, Shape], message: str) -> None:
    with pytest.raises(CheckpointError, match="^" + re.escape(message)):
        check_tensors("folder", [FUSED, BIAS, TIED], found)
