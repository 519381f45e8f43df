"""Packed weights are the weights of the file."""

import gguf
import numpy as np
import pytest

from spaceport.kernels.gguf_weights import GGUF_BLOCKS, from_gguf
from spaceport.kernels.packing import WEIGHT_FORMATS, gate_order, pack, packed_bytes, quantize


@pytest.mark.parametrize("gguf_type", GGUF_BLOCKS)
def test_a_gguf_tensor_is_held_exactly(gguf_type: str) -> None:
    dice = np.random.default_rng(0)
    size, width = GGUF_BLOCKS[gguf_type]
    outputs, inputs = 40, 512
    blocks = dice.integers(0, 256, (outputs * inputs // width, size), dtype=np.uint8)
    for offset in (208,) if gguf_type == "Q6_K" else (0, 2) if gguf_type in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,):
        blocks[:, offset : offset + 2] = (
            dice.standard_normal(len(blocks)).astype(np.float16).view(np.uint8).reshape(-1, 2)
        )
    weights = from_gguf(blocks.reshape(-1), gguf_type, outputs, inputs)
    assert weights is not None
    kind = gguf.GGMLQuantizationType[gguf_type]
    assert np.array_equal(weights.dequantized(), gguf.dequantize(blocks.reshape(outputs, -1), kind))
    assert pack(weights).size == packed_bytes(weights.format, outputs, inputs)


def test_a_tensor_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="has 17 bytes: expected 18 for 1 x 32 weights"):
        from_gguf(np.zeros(17, np.uint8), "Q4_0", 1, 32)


def test_types_and_scales_that_no_format_holds_are_left_to_the_caller() -> None:
    assert from_gguf(np.zeros(100, np.uint8), "IQ2_XXS", 1, 32) is None
    block = np.zeros(18, np.uint8)
    block[:2] = np.array([60000], np.float16).view(np.uint8)  # times 8 is not a float16
    assert from_gguf(block, "Q4_0", 1, 32) is None


@pytest.mark.parametrize(("format_name", "step"), [("int4", 0.51), ("int8", 0.51)])
def test_rounded_weights_are_within_half_a_step(format_name: str, step: float) -> None:
    weights = np.random.default_rng(1).standard_normal((33, 96), dtype=np.float32)
    weights[3, :32], weights[4, 32:64] = 0, 2.5
    quantized = quantize(weights, format_name)
    largest = quantized.scales.astype(np.float32).repeat(32, axis=1)
    assert (np.abs(quantized.dequantized() - weights) <= step * largest + 2e-3).all()
    assert not quantized.dequantized()[3, :32].any()


def test_matrices_of_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="has 48 inputs: expected a multiple of 32"):
        quantize(np.zeros((1, 48), np.float32), "int4")
    with pytest.raises(ValueError, match="rounded to int4 or int8, not int4_k"):
        quantize(np.zeros((1, 32), np.float32), "int4_k")
    with pytest.raises(ValueError, match="width of 20: expected a multiple of 16"):
        gate_order(20)


def test_the_formats_have_the_sizes_of_their_panels() -> None:
    per_block = {"int4": 640, "int4_k": 592, "int8": 1088, "int8_min": 1152, "int8_k": 1104, "int8_k16": 1096}
    for name, size in per_block.items():
        assert packed_bytes(WEIGHT_FORMATS[name], 32, 256) == 8 * size
