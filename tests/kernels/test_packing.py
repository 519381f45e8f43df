"""Packed weights are the weights of the file."""

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.kernels import packing
from spaceport.kernels.gguf_weights import GGUF_BLOCKS, from_gguf
from spaceport.kernels.packing import WEIGHT_FORMATS, gate_order, pack, packed_bytes, quantize


@pytest.mark.parametrize("gguf_type", GGUF_BLOCKS)
def test_a_gguf_tensor_is_held_exactly(gguf_type: str) -> None:
    dice = np.random.default_rng(0)
    size, width, _ = GGUF_BLOCKS[gguf_type]
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


def test_the_search_lowers_the_error_of_int4_weights_and_raises_it_in_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.random.default_rng(1).standard_t(5, (64, 512)).astype(np.float32)
    weights[3], weights[4, :32], weights[5, :32] = 0, 2.5, -1.5

    def errors() -> NDArray[np.float32]:
        found = quantize(weights, "int4_pair").dequantized()
        return np.square(found - weights).reshape(64, -1, 32).sum(axis=2)

    searched = errors()
    monkeypatch.setattr(packing, "_SHARES", ())
    plain = errors()
    assert (searched.sum(axis=1) <= plain.sum(axis=1)).all()
    assert searched.sum() < 0.92 * plain.sum()


def test_bytes_for_scales_and_minima_cost_little_of_the_precision_of_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_SHARES", ())
    weights = np.random.default_rng(1).standard_t(5, (64, 512)).astype(np.float32)
    pairs, halves = (np.square(quantize(weights, name).dequantized() - weights).sum() for name in ("int4_pair", "int4"))
    assert pairs < 1.02 * halves


@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
def test_rounded_weights_are_within_half_a_step(format_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_SHARES", ())  # without the search, which moves single weights further
    weights = np.random.default_rng(1).standard_normal((33, 512), dtype=np.float32)
    weights *= np.exp(np.random.default_rng(2).standard_normal((33, 32), dtype=np.float32)).repeat(16, axis=1)
    weights[3, :256], weights[4, 32:64], weights[5, 32:48] = 0, 2.5, -1.5
    quantized = quantize(weights, format_name)
    found, weight_format = quantized.dequantized(), quantized.format
    each = weight_format.scale_block
    blocks, differences = (values.reshape(33, -1, each) for values in (weights, np.abs(found - weights)))
    steps = quantized.scales.astype(np.float64)
    unit: NDArray[np.float64] = np.zeros((33, 1))
    if quantized.factors is not None and weight_format.scales == "pair":
        unit = quantized.factors.astype(np.float64) * packing.PAIR_FACTOR
        steps = steps * unit
    elif quantized.factors is not None:
        steps = steps * quantized.factors.repeat(256 // each, axis=1)
    # Scales and minima in float16 move the largest weights of a block; bytes are rounded to the nearest one.
    nearest = unit * 16 * weight_format.has_minima
    assert (differences.max(axis=2) <= 0.5 * steps + 1e-3 * np.abs(blocks).max(axis=2) + nearest).all()
    most = 2 ** (weight_format.bits - (not weight_format.has_minima)) - 1
    lowest = np.minimum(blocks.min(axis=2), 0) if weight_format.has_minima else 0
    highest = np.maximum(blocks.max(axis=2), 0) if weight_format.has_minima else np.abs(blocks).max(axis=2)
    needed = (highest - lowest) / most
    # Scales and minima of superblocks are rounded up to a unit.
    units = unit
    for factors, count in ((quantized.factors, 1), (quantized.minimum_factors, most)):
        if factors is not None and weight_format.scales == "superblock":
            units = units + factors.astype(np.float64).repeat(256 // each, axis=1) / count
    assert (steps <= 1.001 * needed + units).all()
    assert not found[3, :256].any()
    assert np.abs(quantize(found, format_name).dequantized() - found).max() <= steps.max()


def test_matrices_of_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="has 48 inputs: expected a multiple of 32 for int4"):
        quantize(np.zeros((1, 48), np.float32), "int4")
    with pytest.raises(ValueError, match="has 32 inputs: expected a multiple of 256 for int4_k"):
        quantize(np.zeros((1, 32), np.float32), "int4_k")
    with pytest.raises(ValueError, match="width of 20: expected a multiple of 16"):
        gate_order(20)
